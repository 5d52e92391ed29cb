"""The status page's frames, for several who look at once."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pdxfer.controller import streams
from pdxfer.controller.streams import Frames


def test_a_reader_that_looks_while_a_frame_is_made_misses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """All streams wake together each second: one makes the frame, the others must not be told that they have it."""
    begun, go_on = threading.Event(), threading.Event()

    def fragments(summary: object) -> dict[str, object]:
        begun.set()
        assert go_on.wait(20)
        return {"topology": "d0 has left"}

    monkeypatch.setattr(streams, "fragments", fragments)
    board: Any = SimpleNamespace(summary=lambda: SimpleNamespace(wall=1.0), latest_requests=lambda count: [])
    frames = Frames(board)
    seen: dict[str, object] = {}

    def second() -> None:
        version, parts = frames.since(0)
        go_on.set()
        first.join(20)
        seen.update(parts, **frames.since(version)[1])

    first = threading.Thread(target=frames.since, args=(0,))
    other = threading.Thread(target=second)
    first.start()
    assert begun.wait(20)
    other.start()
    other.join(0.2)
    go_on.set()
    first.join(20)
    other.join(20)
    assert seen["topology"] == "d0 has left"
