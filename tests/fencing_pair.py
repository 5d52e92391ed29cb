"""Not a test: two processes that show whether a fence holds. Run by test_channel_fencing.py.

    python fencing_pair.py KIND fence|no-fence [--any-transport]

The parent receives. Its child writes 128 MiB, is stopped (SIGSTOP) in the middle, the parent fences it, fills its
blocks with another pattern and lets the child go on. Prints how many bytes of the pattern were overwritten after that.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading

import msgspec
import numpy as np

from pdxfer.core.errors import ChannelError
from pdxfer.testing.channel_suite import SECRET, RecordingSink, make_region, until
from pdxfer.transport.base import EndpointOptions, OutgoingUnit, PeerId, UnitHeader
from pdxfer.transport.kinds import endpoint_factories

NUM_BLOCKS, BLOCK_BYTES = 8, 16 << 20
SENT, REFILLED = 0xAB, 0x5A
WRITER = PeerId(engine_id="writer", incarnation=1, rank=0)
READER = PeerId(engine_id="reader", incarnation=1, rank=0)
OPTIONS = EndpointOptions(max_fence_groups=1, write_timeout_s=5.0)


def write(kind: str, any_transport: bool) -> None:
    """The child: connect, then write every block; says `done` or `dead`."""
    memory, region = make_region(False, 1, NUM_BLOCKS, BLOCK_BYTES)
    memory[:] = SENT
    endpoint = endpoint_factories([kind])[kind](OPTIONS, WRITER, region, RecordingSink(region))
    if any_transport:
        endpoint.accepts = lambda address: ""  # type: ignore[method-assign]
    endpoint.admit([READER], SECRET)
    channel = endpoint.connect(READER, bytes.fromhex(input()), 20.0)
    say("ready")
    input()
    try:
        for block in range(NUM_BLOCKS):
            header = UnitHeader(
                transfer_id="t",
                epoch=0,
                first_block=block,
                num_blocks=1,
                first_layer=0,
                num_layers=1,
                num_bytes=BLOCK_BYTES,
                digest=0,
            )
            source = np.array([[block * BLOCK_BYTES, BLOCK_BYTES]])
            channel.write(OutgoingUnit(header=header, source=source, source_blocks=[block], target_blocks=[block]))
        left = NUM_BLOCKS
        while left:
            left -= len(channel.poll(0.1))
        say("done")
    except ChannelError:
        say("dead")
    input()
    channel.close()
    endpoint.close()


def say(word: str) -> None:
    print(word, flush=True)


def attempt(kind: str, fence: bool, any_transport: bool) -> int | None:
    """The parent: late bytes, or None if the child was too fast to be stopped in the middle."""
    memory, region = make_region(False, 1, NUM_BLOCKS, BLOCK_BYTES)
    memory[:] = 1
    sink = RecordingSink(region)
    sink.grants["t", 0] = list(range(NUM_BLOCKS))
    endpoint = endpoint_factories([kind])[kind](OPTIONS, READER, region, sink)
    endpoint.admit([WRITER], SECRET)
    endpoint.attend(True)
    arguments = [sys.executable, __file__, kind, "write", *(["--any-transport"] if any_transport else [])]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        tell = lambda text: (child.stdin.write(text + "\n"), child.stdin.flush())  # noqa: E731
        tell(endpoint.address().hex())
        assert child.stdout.readline().strip() == "ready"
        tell("go")
        until(lambda: (memory[::BLOCK_BYTES] == SENT).sum() >= 2, "the write to begin")
        os.kill(child.pid, signal.SIGSTOP)
        try:
            if fence:
                endpoint.fence(WRITER)
            complete = bool((memory[BLOCK_BYTES - 1 :: BLOCK_BYTES] == SENT).all())
            memory[:] = REFILLED
        finally:
            os.kill(child.pid, signal.SIGCONT)
        said: list[str] = []
        reading = threading.Thread(target=lambda: said.append(child.stdout.readline().strip()))
        reading.start()
        reading.join(20.0)
        late = int((memory != REFILLED).sum())
        tell("end")
        child.wait(20.0)
    endpoint.close()
    if child.returncode:
        raise SystemExit(f"the writer ended with {child.returncode}")
    return None if complete else late


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("mode", choices=["fence", "no-fence", "write"])
    parser.add_argument("--any-transport", action="store_true")
    given = parser.parse_args()
    if given.mode == "write":
        return write(given.kind, given.any_transport)
    for _ in range(8):
        late = attempt(given.kind, given.mode == "fence", given.any_transport)
        if late or (late == 0 and not given.any_transport):  # an unfenced transport may have been lucky
            return print(msgspec.json.encode({"late_bytes": late}).decode())
    raise SystemExit("the writer could not be stopped in the middle in 8 attempts")


if __name__ == "__main__":
    main()
