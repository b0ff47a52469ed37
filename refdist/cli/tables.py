"""Tables of text: columns that fit their words, numbers to the right."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["table"]


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Lines of a table.

    Args:
        head: of the columns.
        rows: as many words each.
        right: the columns that are set to the right.
    """
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = []
    for row in (head, *rows):
        words = [word.rjust(width) if column in right else word.ljust(width)
                 for column, (word, width) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(words).rstrip())
    return "\n".join(lines)
