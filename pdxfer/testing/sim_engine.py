"""What both simulated engines have: a pool of blocks with owners and contents, membership, and the channel to a peer.

A block's content is (request, index) once computed or landed; a write copies it when it lands, not when it was posted.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from pdxfer.testing.fault_plan import Fate
from pdxfer.testing.sim_world import BEAT_S, Party, World
from pdxfer.wire.messages import (
    Capacity,
    FromMember,
    FromRouter,
    Heartbeat,
    HeartbeatAck,
    Hello,
    PeerNode,
    PeerReady,
    Peers,
    Role,
    WorkerHello,
)

BLOCK = 16
NUM_BLOCKS = 14
STEP_S = 0.1
Content = tuple[str, int]
BAD: Content = ("corrupt", -1)


class SimEngine(Party):
    """A scheduler half, one worker, and their API server: one process."""

    def __init__(self, world: World, name: str, role: Role) -> None:
        super().__init__(world, name)
        self.role = role
        self.channels: dict[str, SimChannel] = {}
        self.ready: dict[str, PeerReady] = {}
        self._begin()

    def _begin(self) -> None:
        """What a new process has."""
        self.free = list(range(NUM_BLOCKS))
        self.owner: dict[int, str] = {}
        self.writable: dict[int, int] = {}
        """Epoch that may write a block; 0: none may any more. Blocks that no grant named are not in it."""
        self.memory: dict[int, Content] = {}
        self.ready.clear()
        self.sched, self.worker = (f"{self.name}/{half}#{self.life}".encode() for half in ("sched", "w0"))
        self.world.members[self.sched] = self.world.members[self.worker] = self

    def take(self, num: int, owner: str) -> list[int]:
        """Blocks for `owner`; none if there are too few. Last returned, first reused: what is late does harm."""
        if len(self.free) < num:
            return []
        blocks = [self.free.pop() for _ in range(num)]
        self.owner.update(dict.fromkeys(blocks, owner))
        return blocks

    def give(self, blocks: list[int]) -> None:
        """They may be reused at once."""
        for block in blocks:
            if self.owner.pop(block, None) is None:
                self.world.violated(f"{self.name}: block {block} was freed twice")
            self.writable.pop(block, None)
            self.free.append(block)
        blocks.clear()

    # ---- life ------------------------------------------------------------------------------------------------

    def crash(self, seconds: float) -> None:
        for route in (self.sched, self.worker):
            del self.world.members[route]
        for channel in self.channels.values():
            channel.died(self)
        super().crash(seconds)

    def restart(self) -> None:
        self._begin()
        super().restart()
        self.say_hello()
        self.world.at(BEAT_S, self, self.beat)
        for channel in self.channels.values():
            self.world.at(0.1, channel.prefill, channel.connect)

    def say_hello(self) -> None:
        """Join, and say which channels are open."""
        capacity = Capacity(num_blocks=NUM_BLOCKS, block_size=BLOCK, max_model_len=1024)
        self.send(
            Hello(
                engine_id=self.name, incarnation=self.life, role=self.role, url=f"http://{self.name}", model="m",
                served_names=["m"], fingerprint={"model": "m"}, capacity=capacity, world_size=1,
                free_blocks=len(self.free),
            )
        )  # fmt: skip
        hello = WorkerHello(engine_id=self.name, incarnation=self.life, rank=0, addresses=[], generation=0)
        self.world.to_router(self, self.worker, hello)
        for ready in self.ready.values():
            self.world.to_router(self, self.worker, ready)

    def beat(self) -> None:
        """Both halves report."""
        wall = self.world.clock.wall()
        self.send(Heartbeat(incarnation=self.life, wall=wall, free_blocks=len(self.free)))
        self.world.to_router(self, self.worker, Heartbeat(incarnation=self.life, wall=wall))
        self.world.at(BEAT_S, self, self.beat)

    def send(self, message: FromMember) -> None:
        """From the scheduler half."""
        self.world.to_router(self, self.sched, message)

    def told(self, route: bytes, message: FromRouter) -> None:
        if isinstance(message, HeartbeatAck):
            self.say_hello()
        elif isinstance(message, Peers):
            for node in message.nodes:
                self._peer(node)
        else:
            self.on_message(route, message)

    def _peer(self, node: PeerNode) -> None:
        if node.engine_id in self.channels and self.role == "prefill":
            ready = PeerReady(engine_id=node.engine_id, incarnation=node.incarnation, kind="nixl")
            if self.ready.get(node.engine_id) != ready:
                self.ready[node.engine_id] = ready
                self.world.to_router(self, self.worker, ready)

    def on_message(self, route: bytes, message: FromRouter) -> None:
        """One that concerns a transfer."""
        raise AssertionError("subclass")


@dataclass(eq=False, slots=True)
class Write:
    """One posted write of one block."""

    transfer_id: str
    epoch: int
    index: int
    """Of the block in the grant."""
    source: int
    target: int
    digest: Content
    generation: int
    is_corrupt: bool
    left: Content | None = None
    """The bytes, if they left before their process died."""


@dataclass(eq=False)
class SimChannel:
    """prefill → decode: writes that nobody can recall, a stream of notices each way, generations."""

    world: World
    prefill: SimEngine
    decode: SimEngine
    generation: int = 1
    is_open: bool = True
    flying: list[Write] = field(default_factory=list)
    grants_before: int = 0
    """Grants that decode had taken back when it let prefill in (Channel.generation)."""
    on_arrived: Callable[[Write], None] = lambda write: None
    on_lost: list[Callable[["SimChannel"], None]] = field(default_factory=list)
    on_done: Callable[[Write], None] = lambda write: None
    num_taken_back: Callable[[], int] = lambda: 0
    """By decode's worker, until now."""

    def post(self, write: Write) -> None:
        """Lands some time, or never."""
        fates = self.world.plan.fates()
        write.is_corrupt = Fate.CORRUPT in fates
        write.generation = self.generation
        self.flying.append(write)
        if Fate.LOST not in fates:
            self.world.at(self.world.plan.delay(fates), None, self._land, write, Fate.DUPLICATED in fates)

    def _land(self, write: Write, twice: bool) -> None:
        if write not in self.flying:
            return
        self.flying.remove(write)
        source = self.prefill
        if write.left is None and source.owner.get(write.source) != write.transfer_id:
            self.world.violated(f"{source.name}: block {write.source} was reused while {write.transfer_id} read it")
        if self.decode.owner.get(write.target) != write.transfer_id:
            owner = self.decode.owner.get(write.target, "nobody")
            self.world.violated(f"a late byte of {write.transfer_id} in block {write.target} of {owner}")
        elif self.decode.writable.get(write.target) != write.epoch:
            epoch = self.decode.writable.get(write.target)
            self.world.violated(
                f"a late byte of epoch {write.epoch} of {write.transfer_id} in a block of epoch {epoch}"
            )
        value = write.left or source.memory.get(write.source, BAD)
        self.decode.memory[write.target] = BAD if write.is_corrupt else value
        self.world.note(f"{write.transfer_id}: unit {write.index} landed{' corrupt' if write.is_corrupt else ''}")
        for _ in range(1 + twice):
            self.world.in_order((self, self.decode.name), self.decode, self.on_arrived, write)
        self.world.in_order((self, self.prefill.name), self.prefill, self.on_done, write)

    def tell(self, party: SimEngine, call: Callable[..., None], *args: object) -> bool:
        """A notice; False: there is no connection."""
        if self.is_open:
            generation = self.generation
            self.world.in_order((self, party.name), party, self._if_open, generation, call, args)
        return self.is_open

    def _if_open(self, generation: int, call: Callable[..., None], args: tuple[object, ...]) -> None:
        if self.is_open and self.generation == generation:
            call(*args)

    def fence(self) -> None:
        """No write of this generation lands from now on. The other side notices soon."""
        self.generation += 1
        self.is_open = False
        self.flying.clear()
        for party, lost in zip((self.prefill, self.decode), self.on_lost, strict=True):
            self.world.in_order((self, party.name), party, lost, self)
        self._reconnect()

    def died(self, who: SimEngine) -> None:
        """A process is gone. What left prefill may land until decode sees the connection closed."""
        if who is self.decode:
            self.fence()
            return
        for write in self.flying:
            write.left = who.memory.get(write.source, BAD)
        self.world.at(self.world.plan.delay(set()), None, self.fence)

    def _reconnect(self) -> None:
        """Prefill does, once it has seen the loss."""
        delay = self.world.rng.uniform(0.05, 0.3)
        self.world.in_order((self, self.prefill.name), self.prefill, self.world.at, delay, self.prefill, self.connect)

    def connect(self) -> None:
        """Prefill opens it anew: decode lets it in once it has seen the old one's end."""
        self.world.in_order((self, self.decode.name), self.decode, self._let_in)

    def _let_in(self) -> None:
        if self.prefill.is_alive and not self.is_open:
            self.generation += 1
            self.is_open = True
            self.grants_before = self.num_taken_back()
