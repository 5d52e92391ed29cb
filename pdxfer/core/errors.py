"""The error tree of pdxfer, by what the caller can do about it.

Every message says what failed, with which values, where they came from and what to do next.
Third-party errors are translated at the boundary with ``raise ... from``.
"""


class PdxferError(Exception):
    """Base of everything we raise on purpose."""


class ConfigError(PdxferError):
    """The user has to change a setting; retrying does not help. Exit code 2 in the CLI."""


class UnreachableError(PdxferError):
    """The other side did not answer; it may later. Exit code 3 in the CLI."""


class ListenError(PdxferError):
    """An address cannot be listened on: taken, or not one of this host. Exit code 1 in the CLI."""


class CutOffError(PdxferError):
    """A process left before what ran in it had ended, because it was told to or its time was up. Exit code 1."""


class ProtocolError(PdxferError):
    """The remote peer sent something that is not our protocol. The message is dropped and counted."""


class ChannelError(PdxferError):
    """A unit could not be moved. The transfer resumes elsewhere or the tail is recomputed."""


class IdentityError(PdxferError):
    """Two sides are not the same model, layout or tokens. Fail closed: recompute."""


class DeadlineError(PdxferError):
    """A wait ended by its deadline. The request falls back to the next way."""
