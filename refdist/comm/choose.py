"""Which algorithm is used when none is asked for: by the number of ranks and the bytes of the whole array.

A table has rows for each operation: up to so many ranks, up to so many bytes, this algorithm. The first row that fits counts; the
last one of an operation fits always.

    FASTEST   for groups that no device counts: measured with ``refdist bench collectives --table``, which writes such a table for
              the machine that it runs on
    LEAST     for groups whose messages a device counts: above 1 KiB the sums and gathers of up to 8 ranks or of a power of two of
              ranks, and all of more than 64 KiB, are by algorithms that send as little as possible, so that traffic is that of
              the papers' formulas; among those the fastest

``comm.table = Table.load(path)`` uses another one, on that group and all groups made from it. All ranks must use the same one: a
device is bound on all ranks of a group, or on none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from refdist.aside import write_aside

__all__ = ["FASTEST", "LEAST", "Row", "Table"]

ANY = 1 << 62


class Row(NamedTuple):
    """``algorithm`` for up to ``ranks`` ranks and arrays of up to ``nbytes`` bytes."""

    ranks: int
    nbytes: int
    algorithm: str


class Table:
    """Rows by operation.

    Args:
        rows: for each operation its rows, in order; a last row for any number of ranks and bytes.

    Attributes:
        known: what calls of the past have found out with this table (see ``Comm.recall``), to be found out once.
    """

    def __init__(self, rows: Mapping[str, Sequence[Row]]) -> None:
        self.rows = {operation: tuple(Row(*row) for row in of_operation) for operation, of_operation in rows.items()}
        self.known: dict[Any, tuple[str, str, int, Any]] = {}
        for operation, of_operation in self.rows.items():
            if not of_operation or of_operation[-1].ranks < ANY or of_operation[-1].nbytes < ANY:
                raise ValueError(f"the table's last row for {operation} must fit any number of ranks and bytes")

    def pick(self, operation: str, ranks: int, nbytes: int) -> str | None:
        """The algorithm of the first row that fits; None for an operation that has no rows."""
        rows = self.rows.get(operation, ())
        return next((row.algorithm for row in rows if ranks <= row.ranks and nbytes <= row.nbytes), None)

    def save(self, path: str | Path) -> None:
        """Write the table as JSON."""
        write_aside(path, json.dumps(self.rows, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Table:
        """Read a table that :meth:`save` wrote."""
        return cls(json.loads(Path(path).read_text()))


_OTHERS = {
    "broadcast": [Row(2, ANY, "binomial"), Row(ANY, 1 << 16, "binomial"), Row(4, ANY, "chain"),
                  Row(ANY, ANY, "scatter_all_gather")],
    "all_to_all": [Row(ANY, ANY, "pairwise")],
}
LEAST = Table({
    "all_reduce": [Row(ANY, 1 << 10, "recursive_doubling"), Row(2, 1 << 18, "recursive_doubling"),
                   Row(2, ANY, "rabenseifner"), Row(3, ANY, "direct"), Row(4, 1 << 18, "rabenseifner"),
                   Row(8, ANY, "direct"), Row(ANY, 1 << 16, "rabenseifner"), Row(ANY, ANY, "ring")],
    "reduce_scatter": [Row(2, ANY, "recursive_halving"), Row(8, ANY, "direct"), Row(ANY, 1 << 16, "recursive_halving"),
                       Row(ANY, ANY, "ring")],
    "all_gather": [Row(8, ANY, "direct"), Row(ANY, 1 << 16, "bruck"), Row(ANY, ANY, "ring")], **_OTHERS,
})
FASTEST = Table({
    "all_reduce": [Row(ANY, 1 << 10, "recursive_doubling"), Row(2, 1 << 18, "recursive_doubling"),
                   Row(2, ANY, "rabenseifner"), Row(3, ANY, "direct"), Row(4, 1 << 18, "recursive_doubling"),
                   Row(4, 1 << 20, "rabenseifner"), Row(8, ANY, "direct"), Row(ANY, 1 << 16, "rabenseifner"),
                   Row(ANY, ANY, "ring")],
    "reduce_scatter": [Row(2, ANY, "recursive_halving"), Row(3, ANY, "direct"), Row(4, 1 << 10, "recursive_doubling"),
                       Row(4, 1 << 22, "recursive_halving"), Row(8, ANY, "direct"), Row(ANY, 1 << 16, "recursive_halving"),
                       Row(ANY, ANY, "ring")],
    "all_gather": [Row(3, ANY, "direct"), Row(4, 1 << 20, "recursive_doubling"), Row(8, ANY, "direct"),
                   Row(ANY, 1 << 16, "bruck"), Row(ANY, ANY, "ring")], **_OTHERS,
})
