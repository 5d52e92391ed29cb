"""After close() a sender may reuse its blocks: what it writes there then never reaches the peer."""

import importlib.util
import threading

import numpy as np
import pytest

from pdxfer.core.errors import ChannelError
from pdxfer.testing.channel_suite import SECRET, RecordingSink, make_region
from pdxfer.transport.base import EndpointOptions, OutgoingUnit, PeerId, UnitHeader
from pdxfer.transport.kinds import endpoint_factories

NUM_BLOCKS, BLOCK_BYTES = 8, 8 << 20
SENT, REUSED = 0xAB, 0x77
HAS_NIXL = importlib.util.find_spec("nixl_cu12") is not None
nixl = pytest.param(
    "nixl", marks=[pytest.mark.nixl, pytest.mark.skipif(not HAS_NIXL, reason="the nixl wheel is not installed")]
)


@pytest.mark.parametrize("kind", ["tcp", "local", nixl])
def test_blocks_reused_after_close_do_not_leak(kind: str) -> None:
    """64 MiB are under way when the channel is closed and its source overwritten with another tenant's bytes."""
    make = endpoint_factories([kind])[kind]
    sides = []
    for name in ("sender", "receiver"):
        memory, region = make_region(False, 1, NUM_BLOCKS, BLOCK_BYTES)
        me = PeerId(engine_id=name, incarnation=1, rank=0)
        sink = RecordingSink(region)
        sides.append((memory, sink, me, make(EndpointOptions(max_fence_groups=1), me, region, sink)))
    (source, _, sender, out), (target, sink, receiver, into) = sides
    source[:], target[:] = SENT, 0
    sink.grants["t", 0] = list(range(NUM_BLOCKS))
    out.admit([receiver], SECRET)
    into.admit([sender], SECRET)
    into.attend(True)
    channel = out.connect(receiver, into.address(), 10.0)
    writer = threading.Thread(target=write_all, args=(channel,))
    writer.start()
    writer.join(0.01)
    channel.close()
    source[:] = REUSED
    writer.join(10.0)
    into.fence(sender)
    for block in (header.first_block for header in sink.landed):
        assert (target[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] == SENT).all(), f"block {block} is not as sent"
    if kind != "local":  # a pull reader may have copied on; what it copied was thrown away
        assert not (target == REUSED).any()
    out.close()
    into.close()


def write_all(channel: object) -> None:
    """Post every block, until the channel is closed under us."""
    try:
        for block in range(NUM_BLOCKS):
            header = UnitHeader(
                transfer_id="t", epoch=0, first_block=block, num_blocks=1, first_layer=0, num_layers=1,
                num_bytes=BLOCK_BYTES, digest=0,
            )  # fmt: skip
            runs = np.array([[block * BLOCK_BYTES, BLOCK_BYTES]])
            channel.write(OutgoingUnit(header=header, source=runs, source_blocks=[block], target_blocks=[block]))  # type: ignore[attr-defined]
    except (ChannelError, ValueError):
        pass
