"""What a TTFT bench can fail with besides a wrong option."""

from pdxfer.core.errors import PdxferError


class BenchError(PdxferError):
    """The run cannot give figures: a server failed, or the figures would not mean what they say. Exit code 1."""
