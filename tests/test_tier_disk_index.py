"""The index of local tiers: what is too old is not shown, and all of that goes, in whatever order it came."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdxfer.store.disk_index import FOREVER, Index, Record
from pdxfer.testing.tier_kit import key_of

TTL_S = 60.0
KEYS = [key_of(name) for name in range(6)]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add"] * 5 + ["remove", "pin", "pin for ever", "unpin", "expire"]),
        st.sampled_from(KEYS),
        st.integers(-20, 50),
    ),
    max_size=30,
)


def index(ttl_s: float = TTL_S) -> Index:
    return Index(
        capacity_bytes=1 << 20, unit_bytes=4096, tenant_quota={}, pin_fraction=1.0, ttl_s=ttl_s, eviction="lru"
    )


@settings(deadline=None)
@given(STEPS)
def test_what_expires_is_what_is_not_shown_any_more(steps: list[tuple[str, bytes, int]]) -> None:
    """The wall clock goes where it wants, values come with any age; a pinned one is never too old."""
    values, wall = index(), 1000.0
    for verb, key, seconds in steps:
        wall += seconds
        record = values.find(key, wall)
        if verb == "add":
            for gone in values.expired(wall):
                values.remove(gone)
            if record is None:
                values.add(Record(key=key, num_bytes=1000, created_wall=wall - abs(seconds)))
        elif verb == "expire":
            for gone in values.expired(wall):
                values.remove(gone)
            assert len(values) == sum(values.find(key, wall) is not None for key in KEYS)
        elif record is not None:
            if verb == "remove":
                values.remove(record)
            elif verb == "unpin":
                values.unpin(record)
            else:
                assert values.pin(record, FOREVER if verb == "pin for ever" else wall + abs(seconds), wall)
        hidden = {record.key for record in values if values.find(record.key, wall) is None}
        assert {record.key for record in values.expired(wall)} == hidden


def test_a_page_of_a_listing_is_full_unless_it_is_the_last_one() -> None:
    """Values that are too old take no place in it."""
    values = index()
    for number, key in enumerate(sorted(KEYS)):
        values.add(Record(key=key, num_bytes=1000, created_wall=900.0 if number < 3 else 1000.0))
    assert [entry.key for entry in values.scan(b"", 2, 1000.0)] == sorted(KEYS)[3:5]
    assert [entry.key for entry in values.scan(sorted(KEYS)[4], 2, 1000.0)] == sorted(KEYS)[5:]
    assert not values.scan(KEYS[0], 2, 2000.0)


@pytest.mark.parametrize("seconds", [0.0, 20.0])
def test_other_threads_may_ask_how_much_is_pinned(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """While values are pinned; and asking ends no pin."""
    values, wall = index(), 1000.0
    records = [Record(key=key, num_bytes=4096, created_wall=wall) for key in KEYS]
    for record in records:
        values.add(record)
    for record in records[:3]:
        assert values.pin(record, wall + 10, wall)
    room_of = values.room_of

    def meanwhile(num_bytes: int) -> int:
        monkeypatch.setattr(values, "room_of", room_of)
        assert values.pin(records[3], FOREVER, wall)
        return room_of(num_bytes)

    monkeypatch.setattr(values, "room_of", meanwhile)
    assert values.pinned_bytes(wall + seconds) == (3 * 4096 if not seconds else 0)
    assert all(record.pin_until for record in records[:3])
