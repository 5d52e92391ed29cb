"""Transfer bench from a clone: python bench/transfer.py [--help]. The code is pdxfer/bench/transfer.py."""

import sys

from pdxfer.bench.transfer import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
