"""Parameters cut along tp and put together again, as the layout table says; nothing here knows a parameter by its name.

    whole parameters ── shard ──▶ this tp rank's part ── storage (replicated or fully sharded) ──▶ what is kept here
    whole parameters ◀─ unshard ─ this tp rank's part ◀─ storage.gather ─────────────────────────  what is kept here

tp cuts first: what a storage of parameters is given are this rank's rows of the table (``local_rows``), whose shapes are those of
this rank's parts, and it needs to know nothing of tp.
"""

from __future__ import annotations

import dataclasses
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
    whole = {}
    for name, part in parts.items():
        row = rows[name]
        if comm.size == 1 or "tp" not in row.shards:
            whole[name] = part
            continue
        dimension = row.shards["tp"]
        ends = [box(row, comm.size, rank)[dimension] for rank in range(comm.size)]
        gathered = comm.all_gather(part, axis=dimension, lengths=[end.stop - end.start for end in ends])
        if row.copies > 1:  # of which the first of each group of neighbours counts
            pieces = np.split(gathered, np.cumsum([end.stop - end.start for end in ends])[:-1], dimension)
            gathered = np.concatenate(pieces[::row.copies], dimension)
        whole[name] = gathered
    return whole


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
