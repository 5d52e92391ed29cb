"""Store bench from a clone: python bench/store.py [--help]. The code is pdxfer/bench/store.py."""

import sys

from pdxfer.cli.main import run

if __name__ == "__main__":
    sys.exit(run(["bench", "store", *sys.argv[1:]]))
