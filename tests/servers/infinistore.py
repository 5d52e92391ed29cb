"""InfiniStore's server in its venv (install.sh), with a pretend RDMA device: it refuses to start without one."""

import ctypes

from servers.process import PLACE, ServerProcess, free_port

VENV = PLACE / "infinistore"
FAKE_VERBS = VENV / "libfakeibv.so"


class InfiniStoreServer(ServerProcess):
    """One server with TCP."""

    def __init__(self) -> None:
        python = VENV / "bin" / "python"
        assert python.exists(), f"{python} is missing: run tests/servers/install.sh (tests/run.sh does)"
        self.port, manage = free_port(), free_port()
        start = "import infinistore.server as s; s.prevent_oom = lambda: None; s.main()"
        ports = ["--host", "127.0.0.1", "--service-port", str(self.port), "--manage-port", str(manage)]
        size = ["--prealloc-size", "1", "--log-level", "warning"]
        env = {"LD_PRELOAD": str(FAKE_VERBS)}
        super().__init__("infinistore", [str(python), "-c", start, *ports, *size], [manage, self.port], env)

    def url(self) -> str:
        """As a tier writes it."""
        return f"infinistore://127.0.0.1:{self.port}"


def pretend_rdma() -> None:
    """For the client in this process, which also insists on a device."""
    ctypes.CDLL(str(FAKE_VERBS), ctypes.RTLD_GLOBAL)
