"""Codec bench from a clone: python bench/codec.py [--help]. The code is pdxfer/bench/codec.py."""

import sys

from pdxfer.bench.codec import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
