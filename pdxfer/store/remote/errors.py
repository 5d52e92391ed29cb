"""What can go wrong with a server, as the tiers see it. Sessions raise these and nothing else."""

from enum import StrEnum

from pdxfer.core.errors import PdxferError


class Reason(StrEnum):
    """Why, from a small closed set: the label of the failure counter."""

    UNREACHABLE = "unreachable"
    """No connection, or it broke."""
    TIMEOUT = "timeout"
    """The deadline came first."""
    BUSY = "busy"
    """All of our connections or buffers were in use until the deadline."""
    REFUSED = "refused"
    """Wrong password, certificate, rights or bucket: a person has to change something."""
    PROTOCOL = "protocol"
    """An answer that makes no sense, or an error the server reports."""
    DAMAGED = "damaged"
    """A value that is there but not whole, or not ours."""
    MOVED = "moved"
    """The key lives on another server now: the topology is asked again."""
    FULL = "full"
    """The server takes no more."""


class ServerError(PdxferError):
    """A call of a session failed; the session is not used again unless `clean`."""

    def __init__(self, reason: Reason, text: str, *, clean: bool = False) -> None:
        super().__init__(text)
        self.reason = reason
        self.clean = clean
        """The conversation is still in step: the connection may be used for the next call."""
