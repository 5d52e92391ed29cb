"""Which engines may exchange KV, which pairs are open, and why others are not. Pure functions over the records."""

from collections import defaultdict
from collections.abc import Collection

from pdxfer.router.members import Engine
from pdxfer.wire.messages import PeerNode, StoreNode

Mismatches = dict[tuple[str, str], str]
"""(prefill, decode) → why they cannot exchange KV."""
Kind = frozenset[tuple[str, str]]
"""A fingerprint and the number of ranks: engines of one kind can use each other's stored chunks."""


def is_eligible(prefill: Engine, decode: Engine, mismatches: Mismatches) -> bool:
    """Whether every rank of `prefill` has an open channel to this life of `decode`, and they are the same model."""
    if prefill is decode or (prefill.engine_id, decode.engine_id) in mismatches:
        return False
    return not _channel_problem(prefill, decode)


def may_exchange(one: Engine, other: Engine, mismatches: Mismatches) -> bool:
    """Whether they should know each other: one can prefill, the other decode, and they are the same model."""
    return any(
        prefill.can_prefill and decode.can_decode and (prefill.engine_id, decode.engine_id) not in mismatches
        for prefill, decode in ((one, other), (other, one))
    )


def peer_node(engine: Engine, rank: int) -> PeerNode:
    """A joined engine's node of one rank, as its peers are told."""
    assert engine.hello is not None
    hello = engine.workers[rank].hello
    return PeerNode(
        engine_id=engine.engine_id, incarnation=engine.incarnation, rank=rank, role=engine.hello.role,
        addresses=hello.addresses, generation=hello.generation,
    )  # fmt: skip


def kind_of(engine: Engine) -> Kind:
    """Of a joined engine."""
    assert engine.hello is not None
    return frozenset({**engine.hello.fingerprint, "world_size": str(engine.hello.world_size)}.items())


def store_nodes(joined: Collection[Engine]) -> dict[tuple[Kind, int], list[StoreNode]]:
    """Who serves tiers, by kind and rank."""
    found: dict[tuple[Kind, int], list[StoreNode]] = defaultdict(list)
    for engine in joined:
        for rank, worker in engine.workers.items():
            if (address := worker.hello.store) is not None:
                found[kind_of(engine), rank].append(
                    StoreNode(
                        engine_id=engine.engine_id, incarnation=engine.incarnation, rank=rank, address=address
                    )
                )  # fmt: skip
    return found


def reasons(engines: Collection[Engine], mismatches: Mismatches, now: float) -> list[str]:
    """What keeps engines and pairs from being used, one sentence each."""
    found = []
    if not any(engine.can_prefill for engine in engines):
        found.append("no prefill engine has said hello")
    if not any(engine.can_decode for engine in engines):
        found.append("no decode engine has said hello")
    for engine in engines:
        if not engine.is_joined:
            found.append(f"engine {engine.engine_id} has not joined: waiting for {engine.missing}")
        if engine.is_suspect:
            found.append(f"engine {engine.engine_id} is suspect: silent for {engine.silent_s(now):.1f} s")
        if engine.is_draining:
            found.append(f"engine {engine.engine_id} is draining")
    found += mismatches.values()
    found += _closed_channels(engines, mismatches)
    return found


def _closed_channels(engines: Collection[Engine], mismatches: Mismatches) -> list[str]:
    usable = [engine for engine in engines if engine.is_usable]
    return [
        f"prefill {prefill.engine_id} → decode {decode.engine_id}: {problem}"
        for decode in usable
        for prefill in usable
        if decode.can_decode and prefill.can_prefill and prefill is not decode
        if (prefill.engine_id, decode.engine_id) not in mismatches
        if (problem := _channel_problem(prefill, decode))
    ]


def _channel_problem(prefill: Engine, decode: Engine) -> str:
    """Why a rank of `prefill` cannot reach `decode`; empty if all can."""
    for rank, worker in prefill.workers.items():
        ready = worker.ready.get(decode.engine_id)
        if ready is None or ready.incarnation != decode.incarnation:
            return f"channel of rank {rank} is not open yet"
        if not ready.kind:
            return f"channel of rank {rank} could not be opened: {ready.reason}"
    return ""
