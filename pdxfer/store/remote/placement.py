"""Which of several equal servers holds a key: rendezvous hashing. Pure."""

from dataclasses import dataclass

import xxhash

from pdxfer.store.remote.url import Address


@dataclass(frozen=True, slots=True)
class Spread:
    """Servers side by side: one more or less moves only its own share of the keys."""

    addresses: tuple[Address, ...]

    def of(self, key: bytes) -> Address:
        """The server with the highest score for this key."""
        if len(self.addresses) == 1:
            return self.addresses[0]
        return max(self.addresses, key=lambda address: xxhash.xxh3_64_intdigest(key + str(address).encode()))
