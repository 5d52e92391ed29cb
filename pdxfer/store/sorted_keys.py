"""Keys in order, for listing page by page: cheap to change at any size, because keys are digests and spread evenly."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator


class SortedKeys:
    """A set of keys that iterates in order from any point. Add and remove cost a search in 1/256 of the keys."""

    def __init__(self) -> None:
        self._buckets: list[list[bytes]] = [[] for _ in range(256)]

    def add(self, key: bytes) -> None:
        """A key that is not there."""
        insort(self._buckets[key[0]], key)

    def remove(self, key: bytes) -> None:
        """A key that is there."""
        bucket = self._buckets[key[0]]
        del bucket[bisect_left(bucket, key)]

    def after(self, key: bytes) -> Iterator[bytes]:
        """Keys greater than `key` (b"": all), in order. Not while keys change."""
        first = key[0] if key else 0
        bucket = self._buckets[first]
        yield from bucket[bisect_right(bucket, key) :]
        for bucket in self._buckets[first + 1 :]:
            yield from bucket
