"""What a launch can fail with besides a wrong setting."""

from pdxfer.core.errors import PdxferError


class LaunchError(PdxferError):
    """A process could not be started or kept up. Exit code 1 in the CLI."""
