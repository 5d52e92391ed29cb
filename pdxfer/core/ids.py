"""Identifiers: how they are made and what they look like on the wire.

``transfer_id`` is minted by the router only; engines refuse ids that the router did not relay to them.
"""

import re
import secrets
import time
from typing import NewType

EngineId = NewType("EngineId", str)
"""Stable name of one vLLM engine (and DP rank), chosen by whoever starts it."""
TransferId = NewType("TransferId", str)
"""One pairing of one request: ``t-`` + 16 hex digits."""

_ENGINE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def new_transfer_id() -> TransferId:
    """A fresh transfer id; unique by 64 random bits."""
    return TransferId(f"t-{secrets.token_hex(8)}")


def new_request_id() -> str:
    """A request id for a client that sent none (``X-Request-Id``)."""
    return f"r-{secrets.token_hex(8)}"


def new_incarnation() -> int:
    """Number of one life of a process: a later start has a larger one (nanoseconds since the epoch)."""
    return time.time_ns()


def is_engine_id(text: str) -> bool:
    """Whether `text` may name an engine: letters, digits, ``. _ -``, at most 64."""
    return _ENGINE_ID.fullmatch(text) is not None
