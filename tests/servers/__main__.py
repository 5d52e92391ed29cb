"""Start real servers and print a tier URL of each, until the process is interrupted or its input ends:

cd tests && python -m servers valkey redis memcached s3 gs az
"""

import sys
from contextlib import ExitStack

from servers.cloud import AzureServer, GcsServer, S3Server
from servers.memcached import MemcachedServer
from servers.redis import RedisServer

START = {
    "redis": lambda: RedisServer("redis"),
    "valkey": lambda: RedisServer("valkey"),
    "memcached": lambda: MemcachedServer("-m", "2048"),
    "s3": S3Server,
    "gs": GcsServer,
    "az": AzureServer,
}

if __name__ == "__main__":
    with ExitStack() as stack:
        for name in sys.argv[1:]:
            server = stack.enter_context(START[name]())
            print(f"{name}={server.url()}", flush=True)
        sys.stdin.read()
