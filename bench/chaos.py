"""Chaos run from a clone: python bench/chaos.py --engine fake --faults 40. The code is pdxfer/bench/chaos.py."""

import sys

from pdxfer.cli.main import run

if __name__ == "__main__":
    sys.exit(run(["bench", "chaos", *sys.argv[1:]]))
