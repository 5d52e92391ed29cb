"""Mooncake's store: master with metadata server, and a process that lends it memory. From the non-cuda wheel."""

import subprocess
import sys
from pathlib import Path

from servers.process import ServerProcess, free_port

_HOLDER = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
for _ in range(50):
    if store.setup("127.0.0.1", sys.argv[1], int(sys.argv[3]), 16 << 20, "tcp", "", sys.argv[2]) == 0:
        break
    time.sleep(0.1)
else:
    sys.exit("the segment could not be mounted")
print("ready", flush=True)
sys.stdin.read()
"""


class MooncakeServer(ServerProcess):
    """Master and holder; what was read may be evicted a second later (100 ms is too short for 8 MiB under load)."""

    def __init__(self, segment_bytes: int = 512 << 20) -> None:
        self.port, self.metadata_port = free_port(), free_port()
        self._segment_bytes = segment_bytes
        self._holder: subprocess.Popen[bytes] | None = None
        master = [str(Path(sys.executable).parent / "mooncake_master"), "-rpc_address", "127.0.0.1"]
        ports = ["-rpc_port", str(self.port), "-metrics_port", str(free_port()), "-default_kv_lease_ttl", "1000"]
        metadata = ["-enable_http_metadata_server=true", "-http_metadata_server_host", "127.0.0.1"]
        metadata += ["-http_metadata_server_port", str(self.metadata_port)]
        super().__init__("mooncake", [*master, *ports, *metadata], [self.port, self.metadata_port])

    def start(self) -> None:
        super().start()
        where = [f"http://127.0.0.1:{self.metadata_port}/metadata", f"127.0.0.1:{self.port}", str(self._segment_bytes)]
        self._holder = subprocess.Popen(
            [sys.executable, "-c", _HOLDER, *where], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log
        )
        assert self._holder.stdout is not None
        ready = any(line == b"ready\n" for line in self._holder.stdout)
        assert ready, f"Mooncake's segment could not be mounted:\n{self.log()}"

    def kill(self) -> None:
        if self._holder is not None:
            self._holder.kill()
            self._holder.communicate()
            self._holder = None
        super().kill()

    def url(self) -> str:
        """As a tier writes it."""
        return f"mooncake://127.0.0.1:{self.port}?metadata=http://127.0.0.1:{self.metadata_port}/metadata"
