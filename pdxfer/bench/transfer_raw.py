"""NIXL's own API with nothing of ours around it: the reference of the nixl channel in the transfer bench.

Same wheel and UCX settings; no progress thread, both sides poll and yield, which is how NIXL is fastest on few cores.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from pdxfer.bench.transfer_rig import OPTIONS, relax
from pdxfer.kv.layout import KvLayout
from pdxfer.transport.nixl_agent import descriptors, load_nixl, set_ucx_defaults

Indices = npt.NDArray[np.int32]
MAX_IN_FLIGHT = 16


def _agent(name: str, layout: KvLayout) -> tuple[Any, Any]:
    set_ucx_defaults(OPTIONS)
    nixl = load_nixl()
    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
    return agent, agent.register_memory([(layout.base, layout.num_bytes, 0, "")], "DRAM")


class RawTarget:
    """The receiving agent."""

    def __init__(self, layout: KvLayout) -> None:
        self._agent, self._memory = _agent("raw-target", layout)
        self.metadata: bytes = self._agent.get_agent_metadata()

    def add(self, metadata: bytes) -> None:
        """Know the sender."""
        self._agent.add_remote_agent(metadata)

    def serve(self, count: int) -> None:
        """Wait for so many notifications."""
        while count > 0:
            count -= sum(len(notes) for notes in self._agent.get_new_notifs().values())
            relax()

    def close(self) -> None:
        """Release the agent."""
        self._agent.deregister_memory(self._memory)
        del self._agent


class RawSender:
    """The sending agent."""

    def __init__(self, layout: KvLayout) -> None:
        self._agent, self._memory = _agent("raw-sender", layout)
        self._layout = layout
        self.metadata: bytes = self._agent.get_agent_metadata()
        self._lists: list[Any] = []

    def add(self, metadata: bytes) -> None:
        """Know the target."""
        name = self._agent.add_remote_agent(metadata)
        self._peer = name.decode() if isinstance(name, bytes) else name

    def paged(self, target: KvLayout) -> tuple[Any, Any]:
        """Descriptors of every block and layer, on both sides."""
        return self._prepare(descriptors(self._layout), descriptors(target))

    def big(self, target: KvLayout, num_bytes: int) -> tuple[Any, Any]:
        """One descriptor from the start of either region."""
        rows = [np.array([[layout.base, num_bytes, 0]], dtype=np.uint64) for layout in (self._layout, target)]
        return self._prepare(rows[0], rows[1])

    def _prepare(self, here: Any, there: Any) -> tuple[Any, Any]:
        local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", here, "DRAM")
        remote = self._agent.prep_xfer_dlist(self._peer, there, "DRAM")
        self._lists += [local, remote]
        return local, remote

    def move(self, lists: tuple[Any, Any], parts: list[tuple[Indices, Indices]]) -> None:
        """Write the parts, several in flight, until all are done here."""
        local, remote = lists
        waiting, posted = list(reversed(parts)), list[Any]()
        while waiting or posted:
            while waiting and len(posted) < MAX_IN_FLIGHT:
                source, target = waiting.pop()
                handle = self._agent.make_prepped_xfer("WRITE", local, source, remote, target, b"u")
                self._agent.transfer(handle)
                posted.append(handle)
            done = [h for h in posted if self._agent.check_xfer_state(h) == "DONE"]
            for handle in done:
                posted.remove(handle)
                handle.release()
            if not done:
                relax()

    def close(self) -> None:
        """Release the agent."""
        for prepared in self._lists:
            prepared.release()
        self._agent.deregister_memory(self._memory)
        self._agent.remove_remote_agent(self._peer)
        del self._agent
