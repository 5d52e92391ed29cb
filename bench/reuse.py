"""`pdxfer bench reuse` from a clone: python bench/reuse.py --quick"""

import sys

from pdxfer.cli.main import run

if __name__ == "__main__":
    sys.exit(run(["bench", "reuse", *sys.argv[1:]]))
