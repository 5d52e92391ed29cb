"""The tables of one rank under tensor parallelism: a model's tables, cut to the KV heads that this rank has.

Calibration sees whole models; rank r of N holds heads r * H / N and on, or, with more ranks than heads, one that others
hold too, as vLLM deals them. What is cut has a digest of its own, which frames name. base.Tables over a TableFolder.
"""

import logging
from collections.abc import Callable

from pdxfer.codec import cachegen_tables, klt_tables
from pdxfer.codec.tables import TableFile, TableFolder, TablesError

log = logging.getLogger(__name__)

CUTS: dict[str, Callable[[TableFile, range], TableFile]] = {
    cachegen_tables.NAME: cachegen_tables.of_heads,
    klt_tables.NAME: klt_tables.of_heads,
}


def heads_of_rank(num_heads: int, rank: int, num_ranks: int) -> range:
    """The KV heads of a rank. Raises TablesError where vLLM would not start either."""
    if num_heads % num_ranks == 0:
        each = num_heads // num_ranks
        return range(rank * each, (rank + 1) * each)
    if num_ranks % num_heads == 0:
        head = rank // (num_ranks // num_heads)
        return range(head, head + 1)
    raise TablesError(f"{num_heads} KV heads cannot be dealt to {num_ranks} ranks")


class RankTables:
    """See the module. Any thread; what is cut is kept."""

    def __init__(self, folder: TableFolder, rank: int, num_ranks: int) -> None:
        self._folder, self._rank, self._num_ranks = folder, rank, num_ranks
        self._cut: dict[bytes, bytes] = {}

    def __repr__(self) -> str:
        return f"<RankTables {self._folder.path} rank {self._rank} of {self._num_ranks}>"

    def current(self, codec: str, level: int) -> bytes | None:
        """To encode with. None also for tables that cannot be cut, with a warning: better none than another head's."""
        whole = self._folder.current(codec, level)
        if whole is None:
            return None
        try:
            return self._cut_of(whole, codec)
        except TablesError as error:
            log.warning("calibrated tables of %s are not used on rank %d: %s", codec, self._rank, error)
            return None

    def find(self, digest: bytes) -> bytes | None:
        """By the digest of what was cut."""
        if digest not in self._cut:
            for path in self._folder.files():
                codec = path.name.partition("-")[0]
                try:
                    self._cut_of(path.read_bytes(), codec)
                except (OSError, TablesError) as error:
                    log.warning("calibrated tables %s are passed over: %s", path, error)
        return self._cut.get(digest)

    def _cut_of(self, data: bytes, codec: str) -> bytes:
        if codec not in CUTS:
            raise TablesError(f"nobody knows how to cut tables of codec {codec}")
        whole = TableFile.from_bytes(data, codec)
        try:
            heads = heads_of_rank(int(whole.facts["shape"][2]), self._rank, self._num_ranks)
            cut = CUTS[codec](whole, heads)
        except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError) as error:
            raise TablesError(f"{codec} tables are damaged: {error}") from error
        found = cut.to_bytes()
        return self._cut.setdefault(cut.digest, found)


def of_rank(folder: TableFolder, rank: int, num_ranks: int) -> "TableFolder | RankTables":
    """The tables that a rank's codecs use."""
    return RankTables(folder, rank, num_ranks) if num_ranks > 1 else folder
