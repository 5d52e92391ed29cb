"""python -m pdxfer.codec.native: build the C library in place, for installations made without a compiler."""

import sys

from pdxfer.codec.native import build

try:
    print(build.build())
except (RuntimeError, OSError) as error:
    sys.exit(f"native codecs not built: {error}")
