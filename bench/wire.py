"""`pdxfer bench wire` from a clone: python bench/wire.py --reps 15"""

import sys

from pdxfer.cli.main import run

if __name__ == "__main__":
    sys.exit(run(["bench", "wire", *sys.argv[1:]]))
