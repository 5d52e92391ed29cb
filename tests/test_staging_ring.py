"""Credits of the staging ring: never more than there are slots, shared fairly, all back at the end."""

import random

from pdxfer.node.staging_ring import MAX_SHARE, Key, StagingRing

A, B, C = ("a", 1), ("b", 1), ("c", 1)


def test_one_transfer_gets_what_a_pipeline_needs_and_no_more() -> None:
    ring = StagingRing(32)
    assert ring.open(A) == {A: MAX_SHARE}
    assert StagingRing(3).open(A) == {A: 3}


def test_a_slot_is_taken_only_with_a_credit_and_never_twice() -> None:
    ring = StagingRing(2)
    assert ring.take(A) is None
    ring.open(A)
    slots = {ring.take(A), ring.take(A)}
    assert slots == {0, 1} and ring.take(A) is None


def test_a_slot_in_use_survives_the_end_of_its_transfer() -> None:
    """The holder may still write or read it: it is nobody else's until released."""
    ring = StagingRing(1)
    ring.open(A)
    slot = ring.take(A)
    assert slot == 0 and ring.close(A) == {} and ring.open(B) == {}
    assert ring.take(B) is None
    assert ring.release(slot) == {B: 1}


def test_a_newcomer_gets_slots_as_others_return_them() -> None:
    ring = StagingRing(4)
    assert ring.open(A) == {A: 4} and ring.open(B) == {}
    for expected in ({B: 1}, {B: 1}, {A: 1}):
        slot = ring.take(A)
        assert slot is not None and ring.release(slot) == expected


def test_credits_of_an_ended_transfer_go_to_the_others() -> None:
    ring = StagingRing(4)
    ring.open(A)
    ring.open(B)
    assert ring.close(A) == {B: 4} and ring.close(A) == {}


def test_random_life_keeps_every_slot_accounted_for() -> None:
    for seed in range(30):
        rng, ring = random.Random(seed), StagingRing(random.Random(seed).randint(1, 12))
        told: dict[Key, int] = {}
        held: list[int] = []
        for _ in range(300):
            key = (f"t{rng.randint(0, 5)}", 1)
            match rng.randint(0, 3):
                case 0:
                    news = ring.open(key)
                case 1:
                    news, told[key] = ring.close(key), 0
                case 2:
                    slot, news = ring.take(key), {}
                    assert (slot is not None) == (told.get(key, 0) > 0), seed
                    if slot is not None:
                        assert slot not in held, seed
                        told[key] -= 1
                        held.append(slot)
                case _:
                    news = ring.release(held.pop(rng.randrange(len(held)))) if held else {}
            for owner, count in news.items():
                told[owner] = told.get(owner, 0) + count
            ring.check()
            assert len(held) + sum(told.values()) <= ring.num_slots, seed
        for slot in held:
            ring.release(slot)
        ring.check()
