"""Moves one value at a time between memory and storage by a NIXL plug-in: register, post, look until done, let go.

Used by nixl_payload.py in a tier's one worker thread; whatever goes wrong is an OSError. A transfer is waited for until
it ends, however long, as a hanging read(2) would be: until then NIXL may touch the memory, and ending its agent holds
the interpreter's lock until the transfer has ended (measured: 58 s with a frozen S3 server). Callers keep to their
deadlines in disk_local.py, which gives the memory back when the thread has ended.
"""

import errno
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from pdxfer.core.errors import ConfigError
from pdxfer.transport.nixl_agent import load_nixl

Operation = Literal["WRITE", "READ"]
LOOKS_AT_ONCE = 64
"""Looks without a pause: most transfers of files are done by then."""
PAUSE_S, MAX_PAUSE_S = 50e-6, 5e-3
Descriptor = tuple[int, int, int, str]
"""Address, length, device, name: as NIXL registers it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """One of NIXL's storage plug-ins and what it moves."""

    name: str
    parameters: Mapping[str, str] = field(default_factory=dict, repr=False)
    memory: Literal["DRAM", "VRAM"] = "DRAM"
    storage: Literal["FILE", "OBJ"] = "FILE"


class StorageAgent(Protocol):
    """What is used of nixl_agent."""

    name: str

    def register_memory(self, reg_list: list[Descriptor], mem_type: str, backends: list[str]) -> Any: ...

    def deregister_memory(self, dereg_list: Any, backends: list[str]) -> None: ...

    def get_xfer_descs(self, descs: list[tuple[int, int, int]], mem_type: str) -> Any: ...

    def initialize_xfer(
        self, operation: str, local: Any, remote: Any, agent: str, notif_msg: bytes, backends: list[str]
    ) -> Any: ...

    def transfer(self, handle: Any) -> str: ...

    def check_xfer_state(self, handle: Any) -> str: ...

    def release_xfer_handle(self, handle: Any) -> None: ...


class Staging(Protocol):
    """Memory that the plug-in can reach, for values that lie in host memory."""

    def lend(self, view: memoryview) -> tuple[int, int]:
        """Address and device of `len(view)` bytes, until `end`."""
        ...

    def load(self, view: memoryview) -> None:
        """From `view`, before a WRITE."""
        ...

    def store(self, view: memoryview) -> None:
        """Into `view`, after a READ."""
        ...

    def end(self) -> None:
        """Lent no more. Idempotent."""
        ...


class InPlace:
    """Host memory itself: no copy."""

    def lend(self, view: memoryview) -> tuple[int, int]:
        return int(np.frombuffer(view, dtype=np.uint8).ctypes.data), 0

    def load(self, view: memoryview) -> None:
        pass

    def store(self, view: memoryview) -> None:
        pass

    def end(self) -> None:
        pass


class Mover:
    """One agent with one plug-in. One thread at a time."""

    def __init__(
        self,
        plugin: Plugin,
        staging: Staging,
        *,
        new_agent: Callable[[Plugin], StorageAgent] | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._plugin = plugin
        self._staging = staging
        self._new_agent = new_agent or create_agent
        self._pause = pause
        self._agent: StorageAgent | None = None

    def __repr__(self) -> str:
        return f"<Mover {self._plugin.name} {'closed' if self._agent is None else self._agent.name}>"

    def open(self) -> None:
        """Make the agent. ConfigError if the plug-in cannot run on this machine."""
        if self._agent is not None:
            return
        try:
            self._agent = self._new_agent(self._plugin)
        except nixl_errors() as error:
            raise ConfigError(
                f"store.tiers: NIXL's plug-in {self._plugin.name} does not start here: {type(error).__name__} {error};"
                " install what it links to (GDS: libcufile; NIXL_LOG_LEVEL=DEBUG names it) or use another tier"
            ) from error

    def move(self, operation: Operation, view: memoryview, target: Descriptor) -> None:
        """All of `view` to or from `target`, whose length is the view's."""
        try:
            self.open()
            self._move(operation, view, target)
        except nixl_errors() as error:
            self.close()
            raise OSError(
                errno.EIO, f"NIXL {self._plugin.name} {operation}: {type(error).__name__} {error}", target[3] or None
            ) from error
        except ConfigError as error:
            raise OSError(errno.EIO, str(error)) from error
        finally:
            self._staging.end()

    def close(self) -> None:
        """The end of the agent; nothing is running. Idempotent."""
        agent, self._agent = self._agent, None
        if agent is not None and hasattr(agent, "agent"):
            agent.agent = None  # the C++ object: a traceback may hold the Python one

    # -- steps ------------------------------------------------------------------------------------------------------

    def _move(self, operation: Operation, view: memoryview, target: Descriptor) -> None:
        agent, plugin, only = self._agent, self._plugin, [self._plugin.name]
        assert agent is not None and target[1] == len(view), (agent, target, len(view))
        address, device = self._staging.lend(view)
        if operation == "WRITE":
            self._staging.load(view)
        memory = agent.register_memory([(address, len(view), device, "")], plugin.memory, only)
        storage = agent.register_memory([target], plugin.storage, only)
        handle = agent.initialize_xfer(
            operation,
            agent.get_xfer_descs([(address, len(view), device)], plugin.memory),
            agent.get_xfer_descs([target[:3]], plugin.storage),
            agent.name,
            b"",
            only,
        )
        state = self._finish(agent, handle)
        agent.release_xfer_handle(handle)
        agent.deregister_memory(storage, only)
        agent.deregister_memory(memory, only)
        if state != "DONE":
            raise OSError(errno.EIO, f"NIXL {plugin.name} {operation} ended as {state}", target[3] or None)
        if operation == "READ":
            self._staging.store(view)

    def _finish(self, agent: StorageAgent, handle: Any) -> str:
        """Post, and look until it has ended (looking drives it, too)."""
        state, looks, pause_s = agent.transfer(handle), 0, PAUSE_S
        while state == "PROC":
            looks += 1
            if looks > LOOKS_AT_ONCE:
                self._pause(pause_s)
                pause_s = min(1.1 * pause_s, MAX_PAUSE_S)
            state = agent.check_xfer_state(handle)
        return state


def create_agent(plugin: Plugin) -> StorageAgent:
    """An agent with this plug-in alone, without a progress thread (storage needs none)."""
    api = load_nixl()
    name = f"pdxfer-{plugin.name.lower()}-{os.getpid()}-{secrets.token_hex(4)}"
    agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend(plugin.name, dict(plugin.parameters))
    return agent  # type: ignore[no-any-return]  # NIXL has no types


def nixl_errors() -> tuple[type[Exception], ...]:
    """What NIXL raises."""
    bindings = sys.modules[load_nixl().nixl_agent.__module__].nixlBind
    return tuple(v for v in vars(bindings).values() if isinstance(v, type) and issubclass(v, Exception))
