"""The operator of a rank: operations run once, end once, report, stop; and the store's integrity is looked at."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from router_kit import wait_until

from pdxfer.config.store import StoreConfig, TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.errors import ConfigError
from pdxfer.node import operator
from pdxfer.node.integrity import Integrity
from pdxfer.node.operator import Operator, Progress
from pdxfer.store.open import open_tiers
from pdxfer.store.runtime import StoreThread
from pdxfer.store.tiered import TieredStore
from pdxfer.testing.fake_clock import FakeClock
from pdxfer.wire.manage import StoreArgs, StoreOp, StoreOpUpdate


@pytest.fixture
def thread() -> Iterator[StoreThread]:
    config = StoreConfig(tiers=[TierConfig(url="dram:", capacity_gib=1 / 256)])

    async def make() -> TieredStore:
        return TieredStore(await open_tiers(config, SYSTEM_CLOCK), config, bytes(16))

    thread = StoreThread(make)
    thread.start(20)
    yield thread
    thread.close(1)


class Rig:
    """An operator whose handler does what the test says."""

    def __init__(self, thread: StoreThread) -> None:
        self.sent: list[StoreOpUpdate] = []
        self.begun = threading.Event()
        self.go = asyncio.Event()
        self.error: Exception | None = None
        self.result: object = {"n": 1}
        self.num_runs = 0
        self.operator = Operator(0, thread, self.handle, self.sent.append)

    async def handle(self, store: TieredStore, op: StoreOp, progress: Progress) -> object:
        self.num_runs += 1
        progress(3, 9)
        self.begun.set()
        if op.verb == "verify":
            await self.go.wait()
        if self.error is not None:
            raise self.error
        return self.result

    def ended(self, count: int = 1) -> list[StoreOpUpdate]:
        wait_until(lambda: sum(update.over for update in self.sent) >= count)
        return [update for update in self.sent if update.over]


def op(verb: str = "lookup", op_id: str = "op-1", deadline_s: float = 60.0) -> StoreOp:
    return StoreOp(op_id=op_id, verb=verb, args=StoreArgs(), deadline_s=deadline_s)  # type: ignore[arg-type]


def test_the_last_word_has_the_result(thread: StoreThread) -> None:
    """Bytes in it as hex."""
    rig = Rig(thread)
    rig.result = {"keys": [b"\x01\x02"], "by": {b"\xff": 1}}
    rig.operator.start(op())
    [last] = rig.ended()
    assert last.result == b'{"keys": ["0102"], "by": {"ff": 1}}' and (last.done, last.total, last.error) == (3, 9, "")


def test_the_same_operation_runs_once(thread: StoreThread) -> None:
    """Asked again, its last word is said again."""
    rig = Rig(thread)
    rig.operator.start(op())
    rig.ended()
    rig.operator.start(op())
    first, again = rig.ended(2)
    assert first == again and rig.num_runs == 1


@pytest.mark.parametrize(
    ("error", "text"),
    [(ConfigError("no tier 'x'"), "no tier 'x'"), (ValueError("odd"), "ValueError: odd")],
)
def test_what_goes_wrong_is_told(thread: StoreThread, error: Exception, text: str) -> None:
    """Ours as it is, a bug with its type."""
    rig = Rig(thread)
    rig.error = error
    rig.operator.start(op())
    assert rig.ended()[0].error == text


def test_cancelling_ends_it_with_how_far_it_was(thread: StoreThread) -> None:
    """Also before its first step; unknown ones are left alone."""
    rig = Rig(thread)
    rig.operator.start(op("verify"))
    assert rig.begun.wait(10)
    rig.operator.cancel("op-1")
    rig.operator.cancel("op-unknown")
    [last] = rig.ended()
    assert (last.error, last.done) == ("cancelled", 3)
    rig.operator.start(op("verify", "op-2"))
    rig.operator.cancel("op-2")
    assert rig.ended(2)[1].error == "cancelled"


def test_the_deadline_ends_it(thread: StoreThread) -> None:
    """With the limit in the text."""
    rig = Rig(thread)
    rig.operator.start(op("verify", deadline_s=0.05))
    assert rig.ended()[0].error == "not done within 0.05 s"


def test_number_and_size_are_bounded(thread: StoreThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """One too many is refused at once; a result that is too large is an error, not a broken message."""
    monkeypatch.setattr(operator, "MAX_RUNNING", 2)
    rig = Rig(thread)
    for number in range(3):
        rig.operator.start(op("verify", f"op-{number}"))
    assert "2 operations are running" in rig.ended()[0].error
    rig.operator.cancel("op-0")
    rig.operator.cancel("op-1")
    rig.ended(3)
    rig.result = {"x": "y" * (2 << 20)}
    rig.operator.start(op(op_id="op-large"))
    assert "1048576 are allowed" in rig.ended(4)[3].error


def test_a_store_that_does_not_add_up_is_a_problem_after_two_looks(thread: StoreThread) -> None:
    """And no longer when it does again."""
    clock = FakeClock()
    integrity = Integrity(thread, clock, every_s=10.0)
    tier = thread.store.slots[0].tier
    broken = threading.Event()

    def check() -> None:
        if broken.is_set():
            raise AssertionError("3 bytes are nobody's")

    tier.check = check  # type: ignore[attr-defined]

    def look() -> list[str]:
        clock.advance(10.0)
        integrity.problems()
        thread.submit(_nothing).result(10)
        return integrity.problems()

    assert look() == []
    broken.set()
    assert look() == [] and look() == ["tier dram does not add up: 3 bytes are nobody's"]
    broken.clear()
    assert look() == []


async def _nothing(store: TieredStore) -> None:
    return None
