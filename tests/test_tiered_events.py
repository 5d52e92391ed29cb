"""The stream of what is near, and the breaker: pure, so tested as such."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pdxfer.store.events import MAX_BATCH, Batch, EventLog, Mirror
from pdxfer.store.policy import Breaker, SecondSight

KEYS = [bytes([n]) * 32 for n in range(6)]
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["add", "evict", "flush"]), st.sampled_from(["dram", "disk"]), st.sets(st.sampled_from(KEYS))
    )
)


@settings(deadline=None)
@given(CHANGES, st.integers(0, 5))
def test_a_mirror_is_what_the_tiers_hold(changes: list[tuple[str, str, set[bytes]]], joins: int) -> None:
    """Whenever it joined: after a flush, exactly."""
    log, mirror = EventLog(), Mirror()
    held: dict[str, set[bytes]] = {"dram": set(), "disk": set()}
    for number, (verb, tier, keys) in enumerate([*changes, ("flush", "dram", set())]):
        if number == min(joins, len(changes)):
            log.subscribe(mirror.apply)
        if verb == "add":
            log.add(tier, sorted(keys))
            held[tier] |= keys
        elif verb == "evict":
            log.evict(tier, sorted(keys))
            held[tier] -= keys
        else:
            log.flush()
    for key in KEYS:
        assert (key in mirror) == any(key in keys for keys in held.values())


def test_a_missed_batch_is_noticed_and_a_snapshot_heals_it() -> None:
    """Numbers without gaps; what came in between is not applied."""
    log, mirror, batches = EventLog(), Mirror(), list[Batch]()
    log.subscribe(batches.append)
    for key in KEYS[:3]:
        log.add("dram", [key])
        log.flush()
    assert [b.seq for b in batches] == [1, 2, 3]
    assert not mirror.apply(batches[1]), "the first one is missing"
    for batch in log.snapshot():
        assert mirror.apply(batch)
    assert mirror.prefix(KEYS) == 3
    log.evict("dram", KEYS[:1])
    log.flush()
    log.add("dram", KEYS[3:4])
    log.flush()
    assert not mirror.apply(batches[-1]) and KEYS[0] in mirror
    assert mirror.apply(batches[-2]) and mirror.apply(batches[-1])
    assert mirror.prefix(KEYS) == 0 and KEYS[3] in mirror


def test_batches_are_bounded() -> None:
    """A large change is several batches, also in a snapshot."""
    log, batches = EventLog(), list[Batch]()
    log.subscribe(batches.append)
    log.add("disk", [n.to_bytes(32, "big") for n in range(MAX_BATCH * 2 + 1)])
    log.flush()
    assert [len(b.added) for b in batches] == [MAX_BATCH, MAX_BATCH, 1]
    snapshot = log.snapshot()
    assert [len(b.added) for b in snapshot] == [MAX_BATCH, MAX_BATCH, 1]
    assert [b.restart for b in snapshot] == [True, False, False]


def test_the_breaker_opens_probes_and_closes() -> None:
    """Three failures in a row; one probe a pause; pauses double up to 4 s, so a server that is back is found in 5."""
    breaker, now = Breaker(), 100.0
    for _ in range(2):
        breaker.failed(now)
    breaker.succeeded()
    for _ in range(3):
        assert breaker.allows(now)
        breaker.failed(now)
    pauses = []
    for _ in range(6):
        assert not breaker.allows(now)
        begin = now
        while not breaker.allows(now):
            now += 0.125
        pauses.append(now - begin)
        assert not breaker.allows(now), "one probe"
        breaker.failed(now)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
    now += 4.0
    assert breaker.allows(now)
    breaker.succeeded()
    assert breaker.allows(now) and breaker.times_opened == 1


def test_a_probe_that_never_ended_is_followed_by_another() -> None:
    """A cancelled call tells nothing."""
    breaker = Breaker()
    for _ in range(3):
        breaker.failed(0.0)
    assert breaker.allows(0.5) and not breaker.allows(0.9) and breaker.allows(1.0)


def test_second_sight_remembers_a_bounded_number() -> None:
    """The oldest are forgotten."""
    sight = SecondSight(2)
    assert [sight.admits(KEYS[n]) for n in (0, 0, 1, 2, 0, 2)] == [False, True, False, False, False, True]
    assert len(sight) == 2
