"""`pdxfer bench ttft` from a clone: python bench/ttft.py --lens 1000,3500 --reps 5 [--link 1gbit]"""

import sys

from pdxfer.cli.main import run

if __name__ == "__main__":
    sys.exit(run(["bench", "ttft", *sys.argv[1:]]))
