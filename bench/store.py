"""Store bench from a clone: python bench/store.py [--help]. The code is pdxfer/bench/store.py.

--servers also starts Valkey, Memcached and SeaweedFS (the servers of the tests) and measures them.
"""

import sys
from contextlib import ExitStack
from pathlib import Path

from pdxfer.cli.main import run


def main(args: list[str]) -> int:
    """Run; the exit code."""
    with ExitStack() as stack:
        if "--servers" in args:
            args.remove("--servers")
            sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
            from servers.cloud import S3Server
            from servers.memcached import MemcachedServer
            from servers.redis import RedisServer

            for name, server in (
                ("redis", RedisServer("valkey")),
                ("memcached", MemcachedServer()),
                ("s3", S3Server()),
            ):
                args += ["--tier", f"{name}={stack.enter_context(server).url()}"]
        return run(["bench", "store", *args])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
