"""Eviction policies against slow references that are obviously right, and what each is for."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdxfer.store.evict import Lfu, Lru, Oldest, Policy, S3Fifo, new_policy

KEYS = [bytes([n]) for n in range(12)]


class SlowLru:
    """Sort by the time of last use."""

    def __init__(self, counts_use: bool = True) -> None:
        self.last: dict[bytes, int] = {}
        self.time = 0
        self.counts_use = counts_use

    def added(self, key: bytes, num_bytes: int) -> None:
        self.time += 1
        self.last[key] = self.time

    def used(self, key: bytes) -> None:
        if key in self.last and self.counts_use:
            self.added(key, 0)

    def removed(self, key: bytes) -> None:
        self.last.pop(key, None)

    def evict(self, blocked: Callable[[bytes], bool]) -> bytes | None:
        for key in sorted(self.last, key=lambda k: self.last[k]):
            if not blocked(key):
                del self.last[key]
                return key
        return None

    def __len__(self) -> int:
        return len(self.last)


class SlowLfu:
    """Sort by (uses + age when last used, time of last use)."""

    def __init__(self) -> None:
        self.rank: dict[bytes, tuple[int, int]] = {}
        self.uses: dict[bytes, int] = {}
        self.age = self.time = 0

    def added(self, key: bytes, num_bytes: int) -> None:
        self.uses[key] = 0
        self.rank[key] = (0, 0)
        self.used(key)

    def used(self, key: bytes) -> None:
        if key in self.rank:
            self.time += 1
            self.uses[key] += 1
            self.rank[key] = (self.age + self.uses[key], self.time)

    def removed(self, key: bytes) -> None:
        self.rank.pop(key, None)

    def evict(self, blocked: Callable[[bytes], bool]) -> bytes | None:
        for key in sorted(self.rank, key=lambda k: self.rank[k]):
            if not blocked(key):
                self.age = max(self.age, self.rank.pop(key)[0])
                return key
        return None

    def __len__(self) -> int:
        return len(self.rank)


class SlowS3Fifo:
    """The paper's pseudo code on plain lists of [key, bytes, uses], oldest first."""

    def __init__(self) -> None:
        self.small: list[list] = []
        self.main: list[list] = []
        self.ghosts: list[bytes] = []

    def added(self, key: bytes, num_bytes: int) -> None:
        if key in self.ghosts:
            self.ghosts.remove(key)
            self.main.append([key, num_bytes, 0])
        else:
            self.small.append([key, num_bytes, 0])

    def used(self, key: bytes) -> None:
        for item in self.small + self.main:
            if item[0] == key:
                item[2] = min(3, item[2] + 1)

    def removed(self, key: bytes) -> None:
        self.small = [item for item in self.small if item[0] != key]
        self.main = [item for item in self.main if item[0] != key]

    def evict(self, blocked: Callable[[bytes], bool]) -> bytes | None:
        while True:
            small = [item for item in self.small if not blocked(item[0])]
            main = [item for item in self.main if not blocked(item[0])]
            if not small and not main:
                return None
            in_small = sum(item[1] for item in self.small)
            in_all = in_small + sum(item[1] for item in self.main)
            if small and (not main or in_small >= 0.1 * in_all):
                item = small[0]
                self.small.remove(item)
                if item[2] > 1:
                    self.main.append([item[0], item[1], 0])
                else:
                    self.ghosts.append(item[0])
                    while len(self.ghosts) > max(1, len(self)):
                        self.ghosts.pop(0)
                    return item[0]
            else:
                item = main[0]
                self.main.remove(item)
                if item[2] == 0:
                    return item[0]
                self.main.append([item[0], item[1], item[2] - 1])

    def __len__(self) -> int:
        return len(self.small) + len(self.main)


PAIRS: dict[str, tuple[Callable[[], Policy], Callable[[], Policy]]] = {
    "lru": (Lru, SlowLru),
    "ttl": (Oldest, lambda: SlowLru(counts_use=False)),
    "lfu": (Lfu, SlowLfu),
    "s3fifo": (S3Fifo, SlowS3Fifo),
}
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(KEYS), st.integers(1, 50)),
        st.tuples(st.just("use"), st.sampled_from(KEYS), st.just(0)),
        st.tuples(st.just("remove"), st.sampled_from(KEYS), st.just(0)),
        st.tuples(st.just("evict"), st.frozensets(st.sampled_from(KEYS), max_size=4), st.just(0)),
    ),
    max_size=80,
)


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=60, deadline=None)
@given(events=EVENTS)
def test_a_policy_chooses_as_its_slow_reference(name: str, events: list) -> None:
    fast, slow = (make() for make in PAIRS[name])
    held: set[bytes] = set()
    for what, about, num_bytes in events:
        if what == "add" and about not in held:
            fast.added(about, num_bytes)
            slow.added(about, num_bytes)
            held.add(about)
        elif what == "use":
            fast.used(about)
            slow.used(about)
        elif what == "remove":
            fast.removed(about)
            slow.removed(about)
            held.discard(about)
        elif what == "evict":
            victim = fast.evict(about.__contains__)
            assert victim == slow.evict(about.__contains__)
            assert victim not in about
            assert (victim is None) == (held <= about)
            held.discard(victim)
        assert len(fast) == len(slow) == len(held)


@pytest.mark.parametrize("name", PAIRS)
def test_a_policy_gives_up_every_key_once(name: str) -> None:
    policy = new_policy(name)
    for key in KEYS:
        policy.added(key, 1)
    assert sorted(policy.evict(lambda key: False) for _ in KEYS) == KEYS
    assert policy.evict(lambda key: False) is None


def hit_rate(name: str, requests: list[bytes], capacity: int) -> float:
    policy, held, hits = new_policy(name), set(), 0
    for key in requests:
        if key in held:
            hits += 1
            policy.used(key)
            continue
        if len(held) == capacity:
            held.discard(policy.evict(lambda key: False))
        policy.added(key, 1)
        held.add(key)
    return hits / len(requests)


def test_s3fifo_and_lfu_withstand_a_scan_and_lru_does_not() -> None:
    """System prompts used all the time, in a stream of prompts that come once."""
    chance = random.Random(3)
    popular = [b"p%d" % n for n in range(40)]
    requests = [chance.choice(popular) if chance.random() < 0.3 else b"once%d" % n for n in range(20_000)]
    rates = {name: hit_rate(name, requests, 60) for name in PAIRS}
    assert rates["lru"] < 0.15 < 0.2 < rates["lfu"] and rates["s3fifo"] > 0.27, rates


def test_lfu_forgets_what_was_popular_long_ago() -> None:
    """A thousand uses last month do not keep a value for ever."""
    policy = Lfu()
    policy.added(b"old", 1)
    for _ in range(1000):
        policy.used(b"old")
    for n in range(3):
        policy.added(b"new%d" % n, 1)
    victims = []
    for n in range(4000):
        victims.append(policy.evict(lambda key: False))
        policy.added(b"later%d" % n, 1)
    assert b"old" in victims
