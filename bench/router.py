"""Router bench from a clone: python bench/router.py [--help]. The code is pdxfer/bench/router.py."""

import sys

from pdxfer.bench.router import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
