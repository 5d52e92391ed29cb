"""The only file that imports NIXL: an agent that neither burns a core when idle nor crashes the process at exit.

An Agent owns one NIXL agent with UCX, registered for one region. All calls are serialised by its lock. Destroying it
is the fence: over TCP and RDMA (not over cma or shared memory, hence the UCX settings) no write that a peer has posted
can land afterwards, and none of ours leaves. UCX takes its settings from the environment only; what the user has set
there wins. Errors of NIXL come out as ChannelError.
"""

import importlib
import ipaddress
import logging
import os
import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pdxfer.core.cpus import unpin_current_thread
from pdxfer.core.errors import ChannelError, ConfigError
from pdxfer.core.install import pip_install
from pdxfer.kv.layout import KvLayout
from pdxfer.transport.base import EndpointOptions
from pdxfer.transport.device import rdma_devices

log = logging.getLogger(__name__)

PROGRESS_DELAY_US = 100_000
"""Longest sleep of NIXL's progress thread between two looks; events of its sockets wake it at once. NIXL's own 0 is a
busy loop of up to half a core, 1,000 costs 2 %, this 0.15 % at equal throughput (measured, nixl 1.5.1)."""
SEGMENT = "256k"
"""Of UCX's TCP buffers: one read takes many 16 KiB blocks; a third less CPU than the 8 KiB default (measured). With
96 KiB blocks any size from 2 KiB to 256 KiB costs the same: what a small one saves in copies it costs in reads."""
WRITER_EXECUTES = ("cma", "posix", "sysv", "xpmem", "knem", "cuda_ipc")
"""UCX transports in which the writer stores into the target's memory itself: destroying the target stops nothing."""
_MODULES = ("nixl_cu12", "nixl_cu13", "nixl._api")
T = TypeVar("T")


def set_ucx_defaults(options: EndpointOptions) -> None:
    """Set UCX's environment where the user has not; to be called before the first agent of the process."""
    defaults = {
        "UCX_TLS": "^" + ",".join(WRITER_EXECUTES),
        "UCX_TCP_TX_SEG_SIZE": SEGMENT,
        "UCX_TCP_RX_SEG_SIZE": SEGMENT,
        "UCX_TCP_USER_TIMEOUT": f"{max(1, round(options.write_timeout_s))}s",
        "UCX_TCP_KEEPIDLE": "5s",
        "UCX_TCP_KEEPINTVL": "2s",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
    }
    if not rdma_devices():
        defaults["UCX_MAX_RMA_RAILS"] = "1"  # else each block is split over eth0 and lo: twice the system calls
    if not Path("/sys/module/efa").exists():
        defaults["UCX_MODULES"] = "^efa"  # its exit handlers crash the process where libefa is missing
    if ipaddress.ip_address(options.bind).is_loopback:
        defaults["UCX_NET_DEVICES"] = "lo"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def writer_executed() -> list[str]:
    """Transports allowed by UCX_TLS that a fence does not stop; empty unless the user has chosen so."""
    setting = os.environ.get("UCX_TLS", "all")
    names = {name.strip() for name in setting.removeprefix("^").split(",")}
    if setting.startswith("^"):
        return [t for t in WRITER_EXECUTES if t not in names]
    groups = {"shm": WRITER_EXECUTES[:5], "sm": WRITER_EXECUTES[:5], "mm": ("posix", "sysv", "xpmem")}
    groups |= {"cuda": ("cuda_ipc",), "all": WRITER_EXECUTES}
    allowed = names | {t for name in names for t in groups.get(name, ())}
    return [t for t in WRITER_EXECUTES if t in allowed]


def load_nixl() -> Any:
    """NIXL's Python API. Raises ConfigError saying what to install."""
    on_cuda_13 = str(getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", "") or "").startswith("13")
    order = ("nixl_cu13", "nixl_cu12", "nixl._api") if on_cuda_13 else _MODULES
    reasons = []
    for name in order:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            reasons.append(f"{name}: {error}")
            continue
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it writes INFO to stdout
        return module
    raise ConfigError(f"NIXL is not installed ({'; '.join(reasons)}): {pip_install('nixl')}")


class Agent:
    """One NIXL agent.

    A receiving agent has NIXL's progress thread, so that bytes land although nobody looks. Driven by our own looks
    instead it takes a sixth less CPU a byte (the sender need not wake anybody), but NIXL's `get_new_notifs` holds the
    interpreter's lock, and so would the copying. A sending agent has none: whoever waits for its writes drives them,
    which costs a third to a half less CPU a byte (measured over TCP).
    """

    def __init__(self, prefix: str, layout: KvLayout, receives: bool) -> None:
        self.name, self._layout, self._receives = f"{prefix}-{secrets.token_hex(6)}", layout, receives
        self._lock = threading.RLock()
        self._nixl = load_nixl()
        self._bindings = sys.modules[self._nixl.nixl_agent.__module__].nixlBind
        self._errors: tuple[type[Exception], ...] = tuple(
            v for v in vars(self._bindings).values() if isinstance(v, type) and issubclass(v, Exception)
        )
        self._lists: dict[str, Any] = {}
        """Prepared descriptor lists: ours under "", a peer's under its agent name."""
        self._handles: set[Any] = set()
        self._agent: Any = _on_unpinned_thread(self._create)
        with self._nixl_call("register memory"):
            self._registration = self._agent.register_memory(
                [(layout.base, layout.num_bytes, layout.device, "")], layout.memory
            )
            self.metadata: bytes = self._agent.get_agent_metadata()

    def __repr__(self) -> str:
        return f"<Agent {self.name} {'open' if self._agent is not None else 'destroyed'} posted={len(self._handles)}>"

    def _create(self) -> Any:
        plain = self._bindings.nixlAgentConfig

        class Quiet(plain):  # type: ignore[misc, valid-type]  # the Python API fixes the delay at 0 and offers no option
            pthrDelay = property(
                plain.pthrDelay.__get__, lambda self, _: plain.pthrDelay.__set__(self, PROGRESS_DELAY_US)
            )

        api = self._nixl
        sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
        with self._nixl_call("create an agent"):
            self._bindings.nixlAgentConfig = Quiet
            try:
                config = api.nixl_agent_config(enable_prog_thread=self._receives, backends=[], sync_mode=sync)
                agent = api.nixl_agent(self.name, config)
            finally:
                self._bindings.nixlAgentConfig = plain
            agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
            return agent

    # ---- peers -----------------------------------------------------------------------------------------------------

    def add_peer(self, metadata: bytes) -> str:
        """Load a peer's metadata; its agent's name."""
        with self._nixl_call("load a peer's metadata"):
            name = self._agent.add_remote_agent(metadata)
            return name.decode() if isinstance(name, bytes) else str(name)

    def remove_peer(self, name: str) -> None:
        """Forget a peer. Stops nothing that is posted."""
        with self._nixl_call("remove a peer"):
            handles = self._lists.pop(name, None)
            if handles is not None:
                handles.release()
            self._agent.remove_remote_agent(name)

    # ---- writing ---------------------------------------------------------------------------------------------------

    def prepare(self, peer: str, layout: KvLayout) -> None:
        """Descriptors of every block of every layer, here and there, once; writes then name them by index."""
        with self._nixl_call("prepare descriptors"):
            if "" not in self._lists:
                self._lists[""] = self._prepare("NIXL_INIT_AGENT", self._layout)
            self._lists[peer] = self._prepare(peer, layout)

    def _prepare(self, owner: str, layout: KvLayout) -> Any:
        return self._agent.prep_xfer_dlist(owner, descriptors(layout), layout.memory)

    def write(self, peer: str, source: npt.NDArray[np.int32], target: npt.NDArray[np.int32], note: bytes) -> Any:
        """Post a write of our descriptors onto the peer's; `note` reaches it after the bytes. Returns a handle."""
        with self._nixl_call("post a write"):
            handle = self._agent.make_prepped_xfer("WRITE", self._lists[""], source, self._lists[peer], target, note)
            self._handles.add(handle)
            self._agent.transfer(handle)
            return handle

    def done(self, handle: Any) -> bool:
        """Whether a write is complete; drives it too, so it must be called until it is."""
        with self._nixl_call("write"):
            state = self._agent.check_xfer_state(handle)
            if state == "PROC":
                return False
            if state != "DONE":
                raise ChannelError(f"NIXL write ended as {state}")
            self._handles.discard(handle)
            handle.release()
            return True

    # ---- notes -----------------------------------------------------------------------------------------------------

    def send(self, peer: str, note: bytes) -> None:
        """Send a note; not ordered against writes that are not done."""
        with self._nixl_call("send a notification"):
            self._agent.send_notif(peer, note)

    def notes(self) -> Iterator[tuple[str, bytes]]:
        """What has come since the last call, as (agent name, note)."""
        with self._nixl_call("look for notifications"):
            found = self._agent.get_new_notifs()
        for name, notes in found.items():
            for note in notes:
                yield name, note

    # ---- end -------------------------------------------------------------------------------------------------------

    @property
    def destroyed(self) -> bool:
        """destroy() was called."""
        return self._agent is None

    def destroy(self) -> None:
        """The fence. When it returns the NIXL agent is gone; idempotent."""
        with self._lock:
            agent, self._agent = self._agent, None
            if agent is None:
                return
            for handle in [*self._handles, *self._lists.values()]:
                _quietly(handle.release, self._errors)
                handle._agent, handle._released = None, True
            self._handles.clear()
            self._lists.clear()
            _quietly(partial(agent.deregister_memory, self._registration), self._errors)
            # Frames of an exception on its way may hold the Python object; what counts is the C++ object inside it.
            inner, agent.agent = weakref.ref(agent.agent), None
            assert inner() is None, "somebody still holds the NIXL agent: it is not fenced"

    @contextmanager
    def _nixl_call(self, what: str) -> Iterator[None]:
        with self._lock:
            if getattr(self, "_agent", self) is None:
                raise ChannelError(f"cannot {what}: this agent was destroyed")
            try:
                yield
            except self._errors as error:
                raise ChannelError(f"NIXL cannot {what}: {type(error).__name__} {error}".rstrip()) from error


def descriptors(layout: KvLayout) -> npt.NDArray[np.uint64]:
    """Shape [L * B, 3]: address, length, device of block b of layer l at row l * B + b."""
    rows = np.empty((layout.num_layers * layout.num_blocks, 3), dtype=np.uint64)
    blocks = np.arange(layout.num_blocks, dtype=np.uint64) * np.uint64(layout.block_stride)
    layers = np.asarray(layout.layer_offsets, dtype=np.uint64) + np.uint64(layout.base)
    rows[:, 0] = (layers[:, None] + blocks[None, :]).reshape(-1)
    rows[:, 1], rows[:, 2] = layout.block_bytes, layout.device
    return rows


def indices(layout: KvLayout, blocks: list[int], first_layer: int, num_layers: int) -> npt.NDArray[np.int32]:
    """Rows of `descriptors` that hold these blocks in these layers, in canonical order. Raises ValueError."""
    if not blocks or min(blocks) < 0 or max(blocks) >= layout.num_blocks:
        raise ValueError(f"block ids {blocks[:4]}... are not all within a pool of {layout.num_blocks} blocks")
    if first_layer < 0 or first_layer + num_layers > layout.num_layers:
        raise ValueError(f"layers {first_layer}+{num_layers} outside {layout.num_layers} layers")
    step = layout.num_blocks
    layers = np.arange(first_layer * step, (first_layer + num_layers) * step, step, dtype=np.int32)
    return np.add.outer(layers, np.array(blocks, dtype=np.int32)).reshape(-1)


def _on_unpinned_thread(make: Callable[[], T]) -> T:
    """Run `make` where NIXL's own threads inherit all CPUs, not the compute thread's one."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        unpin_current_thread()
        try:
            results.append(make())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="pdxfer-nixl-create")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _quietly(act: Callable[[], object], errors: tuple[type[Exception], ...]) -> None:
    """Release something of an agent that is about to be destroyed; its peer may be gone."""
    try:
        act()
    except errors as error:
        log.debug("while destroying a NIXL agent: %r", error)
