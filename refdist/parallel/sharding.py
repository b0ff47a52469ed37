"""Parameters cut along tp and put together again, as the layout table says; nothing here knows a parameter by its name.

    whole parameters ── shard ──▶ this tp rank's part ── storage (replicated or fully sharded) ──▶ what is kept here
    whole parameters ◀─ unshard ─ this tp rank's part ◀─ storage.gather ─────────────────────────  what is kept here

tp cuts first: what a storage of parameters is given are this rank's rows of the table (``local_rows``), whose shapes are those of
this rank's parts, and it needs to know nothing of tp.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from refdist.comm import Comm
from refdist.comm.reduction import bounds
from refdist.model.layout import ParameterLayout

__all__ = ["box", "counted", "local_rows", "own_part", "shard", "sum_partial", "unshard"]

Rows = Mapping[str, ParameterLayout]


def box(row: ParameterLayout, tp: int, rank: int) -> tuple[slice, ...]:
    """The part of a parameter that one of ``tp`` ranks holds, one slice a dimension.

    Units (heads) are dealt out whole, as ``np.array_split`` does; with copies, neighbours get the same ones.
    """
    whole = [slice(0, length) for length in row.shape]
    if "tp" in row.shards:
        dimension = row.shards["tp"]
        offsets = bounds(row.shape[dimension] // row.unit, tp // row.copies)
        part = rank // row.copies
        whole[dimension] = slice(offsets[part] * row.unit, offsets[part + 1] * row.unit)
    return tuple(whole)


def local_rows(rows: Rows, tp: int, rank: int) -> dict[str, ParameterLayout]:
    """The table with the shapes of one rank's parts."""
    if tp == 1:
        return dict(rows)
    return {name: dataclasses.replace(row, shape=tuple(part.stop - part.start for part in box(row, tp, rank)))
            for name, row in rows.items()}


def shard(rows: Rows, params: Mapping[str, np.ndarray], tp: int, rank: int) -> dict[str, np.ndarray]:
    """Views of one rank's parts of whole arrays."""
    return {name: params[name][box(row, tp, rank)] for name, row in rows.items()}


def own_part(array: np.ndarray, comm: Comm) -> np.ndarray:
    """The rows that are this rank's when all ranks of a group share those of an array [rows, …], as a view."""
    if comm.size == 1:
        return array
    cuts = bounds(len(array), comm.size)
    return array[cuts[comm.rank]:cuts[comm.rank + 1]]


def unshard(rows: Rows, parts: Mapping[str, np.ndarray], comm: Comm) -> dict[str, np.ndarray]:
    """Whole arrays from each rank's parts; collective over the tp group, every rank gets them.

    Args:
        rows: the table of the whole parameters.
        parts: of the names that are wanted.
    """
    whole = dict(parts)
    cut = [name for name in parts if comm.size > 1 and "tp" in rows[name].shards]
    for layer in dict.fromkeys(rows[name].layer for name in cut):
        whole.update(_gathered(rows, {name: parts[name] for name in cut if rows[name].layer == layer}, comm))
    return whole


def _gathered(rows: Rows, parts: Mapping[str, np.ndarray], comm: Comm) -> dict[str, np.ndarray]:
    """Whole arrays from each rank's parts, which are of one dtype and travel as one message."""
    shapes = [[tuple(part.stop - part.start for part in box(rows[name], comm.size, rank)) for name in parts]
              for rank in range(comm.size)]
    mine = np.concatenate([part.reshape(-1) for part in parts.values()])
    gathered = comm.all_gather(mine, lengths=[sum(map(math.prod, of_rank)) for of_rank in shapes])
    pieces: dict[str, list[np.ndarray]] = {name: [] for name in parts}
    end = 0
    for of_rank in shapes:
        for name, shape in zip(parts, of_rank, strict=True):
            start, end = end, end + math.prod(shape)
            pieces[name].append(gathered[start:end].reshape(shape))
    # of neighbours with the same part the first counts
    return {name: np.concatenate(of_ranks[::rows[name].copies], rows[name].shards["tp"]) for name, of_ranks in pieces.items()}


def counted(row: ParameterLayout, rank: int) -> bool:
    """Whether this tp rank's part counts in a sum over all elements of all parameters; the copies on other ranks do not."""
    return rank % row.copies == 0 if "tp" in row.shards else rank == 0


def sum_partial(rows: Rows, gradients: Mapping[str, np.ndarray], comm: Comm, copies: Comm) -> None:
    """Sum, in place, the gradients that are partial over tp: what each rank computed on its part of the sequence, or with its
    part of the query heads, is one term. Collective.

    Args:
        rows: the table; ``"tp" in partial`` says which.
        gradients: this rank's, by name.
        comm: the tp group.
        copies: the neighbours that hold the same KV heads.
    """
    for group, cut in ((comm, False), (copies, True)):
        if group.size == 1:
            continue
        names = [name for name in gradients if "tp" in rows[name].partial and ("tp" in rows[name].shards) == cut]
        if not names:
            continue
        flat = np.concatenate([gradients[name].reshape(-1) for name in names])
        group.all_reduce(flat, out=flat)
        end = 0
        for name in names:
            start, end = end, end + gradients[name].size
            gradients[name][...] = flat[start:end].reshape(gradients[name].shape)
