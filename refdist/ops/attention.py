"""Causal grouped-query attention in tiles: FlashAttention-2 (Dao 2023, algorithms 1 and 2) in NumPy.

    S   = scale · q kᵀ          where the query sees the key, else −∞          scale = 1 / √head_dim
    lse = log Σ_keys exp S      [batch, seq, heads]
    P   = exp(S − lse)
    out = P v

    D  = Σ_d dout · out         dP = dout vᵀ          dS = P · (dP − D)
    dq = scale · dS k           dk = scale · dSᵀ q    dv = Pᵀ dout

The [seq, seq] matrix never exists: queries and keys meet in tiles, a tile in which nobody sees anybody is skipped, and
an online softmax carries the running maximum and sum of each query from tile to tile. Only out and lse are saved.
A query that sees no key has out = 0 and lse = −∞.

Positions are arguments, so that context parallelism can call the kernels on chunks of a sequence: the results of two
calls on different keys are put together by `merge_attention`; `attention_backward` then takes the merged out and lse.

Layout: q [batch, seq, heads, head_dim], k and v [batch, seq, kv_heads, head_dim], as the projections write them; query
head j uses KV head j // group, where group = heads / kv_heads. A tile of scores is a matrix [keys, columns]: a column is one
query of one head in one row of the batch, ordered (row, KV head, head of its group, query). So what belongs to a query runs
along memory, and one product serves all heads that share a KV head and sums their dk and dv. What has head_dim numbers a query
or a key is kept as [rows, kv_heads, …, head_dim] meanwhile: the queries of a tile are turned once, for their product with k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..numerics.rounding import store, widened
from .kernel import accumulation_dtype, empty_like, in_two_steps, kernel, working

__all__ = ["AttentionMask", "attention", "attention_backward", "merge_attention"]

QUERY_BLOCK = 32
KEY_BLOCK = 128
COLUMNS = 64  # least width of a product: the queries of all heads that share a KV head count together
TILE = 131072  # elements of one tile of scores: forward has one and backward two, which fit the second-level cache

Dropout = Callable[[slice, slice, slice, slice], np.ndarray]


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """Who sees whom: a query sees the keys that are not after it and, where segments are given, of its own segment.

    All layers of a micro-batch share one mask, which remembers what has been worked out about its tiles.
    """

    q_positions: np.ndarray  # integers [queries]
    k_positions: np.ndarray  # integers [keys]
    q_segments: np.ndarray | None = None  # integers [batch, queries]
    k_segments: np.ndarray | None = None  # integers [batch, keys]
    _visible: dict[Any, list[tuple[slice, KeyTiles]]] = field(default_factory=dict, repr=False)

    @cached_property
    def visible_pairs(self) -> float:
        """(query, key) pairs that the causal mask lets through, a query's own position counted half; without segments.

        Summed over the chunks of a sequence of length s this is s²/2, however the sequence is cut.
        """
        keys = np.sort(self.k_positions)
        before = np.searchsorted(keys, self.q_positions, side="left")
        up_to = np.searchsorted(keys, self.q_positions, side="right")
        return float(np.add.reduce(before) + np.add.reduce(up_to)) / 2

    def visible_tiles(self, row: int, group: int, query_block: int, dtype: np.dtype) -> list[tuple[slice, KeyTiles]]:
        """For each block of queries, in a row of the batch, the tiles of keys in which somebody is seen."""
        what = (row if self.q_segments is not None else 0, group, dtype, query_block, KEY_BLOCK)
        if what not in self._visible:
            self._visible[what] = list(_visible_tiles(self, row, group, query_block, dtype))
        return self._visible[what]


@lru_cache(maxsize=16)
def _limits(dtype: np.dtype) -> tuple[np.floating[Any], np.floating[Any]]:
    """The lowest finite number of a format, and the smallest positive one with all its digits."""
    limits = np.finfo(dtype)
    return limits.min, limits.tiny


def _flops(products: int, q: np.ndarray, mask: AttentionMask) -> int:
    """FLOPs of so many products [queries, keys] × head_dim in each head, of which only the visible part counts."""
    return int(2 * products * q.shape[0] * q.shape[2] * q.shape[3] * mask.visible_pairs)


@kernel(flops=lambda q, k, v, mask, *_: _flops(2, q, mask))
def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: AttentionMask,
    dropout: Dropout | None = None,
    *,
    dtype: Any = None,
    empty: Callable[..., np.ndarray] = empty_like,
    matmul: Callable[..., np.ndarray] = np.matmul,
) -> tuple[np.ndarray, np.ndarray]:
    """Attend.

    Args:
        q: [batch, queries, heads, head_dim].
        k, v: [batch, keys, kv_heads, head_dim].
        mask: positions and segments.
        dropout: None, or a function(rows, heads, queries, keys) of slices that gives the factors of P for one tile,
            [rows, heads, queries, keys]: 0 where dropped, else 1 / (1 − p).
        dtype: of out, where that is to be merged with others; None: that of q.

    Returns:
        out: like q; lse: [batch, queries, heads], natural logarithm, in float32 or wider.
    """
    result, lse = empty(q, dtype=dtype or q.dtype), empty(q, shape=q.shape[:3], dtype=accumulation_dtype(q))
    out, scale = working(result), q.shape[3] ** -0.5
    rounded, multiply = in_two_steps(matmul)
    q, k, v = rounded(q), rounded(k), rounded(v)
    q_heads, out_heads = _by_kv_head(q, k), _by_kv_head(out, k)
    log_sums = empty_like(lse, q_heads.shape[:4])  # [batch, kv_heads, group, queries]
    k_heads, v_heads = k.swapaxes(1, 2), v.swapaxes(1, 2)  # [batch, kv_heads, keys, head_dim]
    scores, lowest, smallest = _Scratch(lse), *_limits(lse.dtype)
    for rows, heads, tiles in _tiles(q, k, mask):
        for queries, key_tiles in tiles:
            query = _turned(rounded(_taken(q_heads, rows, heads, queries, scale)))  # [rows, kv_heads, head_dim, group · queries]
            norm: Any = None
            top: Any = None
            total: Any = None  # Σ P v [rows, kv_heads, group · queries, head_dim], not yet divided
            for keys, hidden in key_tiles:
                p = _product(k_heads[rows, heads, keys], query, scores, multiply)  # [keys, columns]
                _hide(p, hidden)
                highest = np.maximum.reduce(p, axis=0)  # [columns]
                old_top, top = top, highest if top is None else np.maximum(top, highest)
                shift = np.maximum(top, lowest)  # −∞ less −∞ is no number
                p -= shift
                np.exp(p, out=p)
                sums = np.add.reduce(p, axis=0)
                if dropout is not None:
                    p *= _factors(dropout, rows, heads, queries, keys, q.shape[2] // k.shape[2], p.dtype)
                terms = multiply(_by_head(rounded(p), query).swapaxes(2, 3), v_heads[rows, heads, keys])
                if total is None:
                    norm, total = sums, terms
                else:
                    shrink = np.exp(old_top - shift)
                    norm *= shrink
                    norm += sums
                    total *= shrink.reshape(*total.shape[:3], 1)
                    total += terms
            here, logs = out_heads[rows, heads, :, queries], log_sums[rows, heads, :, queries]
            if total is None:
                here[...], logs[...] = 0, -np.inf
                continue
            np.maximum(norm, smallest, out=norm)  # 0 / 0 is no number, but 0 where a query sees no key
            np.divide(total.reshape(here.shape), norm.reshape(*here.shape[:4], 1), out=here)
            top += np.log(norm)
            logs[...] = top.reshape(logs.shape)
    lse[...] = log_sums.reshape(q.shape[0], q.shape[2], q.shape[1]).swapaxes(1, 2)
    return result if out is result else store(out, result), lse


@kernel(flops=lambda dout, q, k, v, out, lse, mask, *_: _flops(4, q, mask))
def attention_backward(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    mask: AttentionMask,
    dropout: Dropout | None = None,
    *,
    dtype: Any = None,
    empty: Callable[..., np.ndarray] = empty_like,
    matmul: Callable[..., np.ndarray] = np.matmul,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dq, dk, dv, shaped like q, k, v, from dout like q and what `attention` was given and returned.

    With k and v a part of the keys, and out and lse over all of them, dq is the part that comes from these keys.
    `dtype` is that of the results, where they are terms of sums; None: those of q, k and v.
    """
    results = [empty(x, dtype=dtype or x.dtype) for x in (q, k, v)]
    dq, dk, dv = (working(x) for x in results)
    scale = q.shape[3] ** -0.5
    rounded, multiply = in_two_steps(matmul)
    q, k, v, dout, out = rounded(q), rounded(k), rounded(v), rounded(dout), widened(out)
    dout_heads, q_heads, dq_heads = (_by_kv_head(x, k) for x in (dout, q, dq))
    d_heads, log_sums = (
        x.swapaxes(1, 2).copy().reshape(q_heads.shape[:4])  # [batch, kv_heads, group, queries]
        for x in (
            np.vecdot(dout, out, dtype=lse.dtype),  # D
            np.where(lse == -np.inf, np.inf, lse),  # a query that saw nothing: P = 0
        )
    )
    k_heads, v_heads = k.swapaxes(1, 2), v.swapaxes(1, 2)  # [batch, kv_heads, keys, head_dim]
    scores, slopes = _Scratch(lse), _Scratch(lse)
    for rows, heads, tiles in _tiles(q, k, mask):
        dkey = np.zeros_like(k_heads[rows, heads], dtype=lse.dtype, order="C")
        dvalue = np.zeros_like(dkey)
        for queries, key_tiles in tiles:
            query = rounded(_taken(q_heads, rows, heads, queries, scale))  # [rows, kv_heads, group · queries, head_dim]
            dtotal = _taken(dout_heads, rows, heads, queries)
            query_columns, dtotal_columns = _turned(query), _turned(dtotal)
            d, log_sum = (x[rows, heads, :, queries].reshape(-1) for x in (d_heads, log_sums))  # [columns]
            dquery: Any = None
            for keys, hidden in key_tiles:
                p = _product(k_heads[rows, heads, keys], query_columns, scores, multiply)  # [keys, columns]
                _hide(p, hidden)
                p -= log_sum
                np.exp(p, out=p)
                ds = _product(v_heads[rows, heads, keys], dtotal_columns, slopes, multiply)  # dP, until D is taken off
                dropped = p
                if dropout is not None:
                    factors = _factors(dropout, rows, heads, queries, keys, q.shape[2] // k.shape[2], p.dtype)
                    dropped = p * factors
                    ds *= factors
                dvalue[:, :, keys] += multiply(_by_head(rounded(dropped), query_columns), dtotal)
                ds -= d
                ds *= p
                slope = _by_head(rounded(ds), query_columns)
                dkey[:, :, keys] += multiply(slope, query)
                term = multiply(slope.swapaxes(2, 3), k_heads[rows, heads, keys])
                dquery = term if dquery is None else np.add(dquery, term, out=dquery)
            here = dq_heads[rows, heads, :, queries]
            if dquery is None:
                here[...] = 0
            else:
                np.multiply(dquery.reshape(here.shape), scale, out=here)
        dk.swapaxes(1, 2)[rows, heads] = dkey
        dv.swapaxes(1, 2)[rows, heads] = dvalue
    for x, result in zip((dq, dk, dv), results, strict=True):
        if x is not result:
            store(x, result)
    return results[0], results[1], results[2]


@kernel()
def merge_attention(out: np.ndarray, lse: np.ndarray, other_out: np.ndarray, other_lse: np.ndarray) -> None:
    """Put the same queries' attention over two disjoint sets of keys together, in place in out and lse.

    out_new = out + w (out_other − out) with w = exp(lse_other) / (exp lse + exp lse_other), lse_new the log of that sum: the
    weights add up to one however lse is rounded, so that errors do not grow with the number of merges.

    Args:
        out, other_out: [batch, queries, heads, head_dim].
        lse, other_lse: [batch, queries, heads], float32 or wider; −∞ where a query has seen nothing.
    """
    merged = np.logaddexp(lse, other_lse)
    ahead = np.full_like(lse, -np.inf)
    np.subtract(other_lse, lse, out=ahead, where=other_lse > -np.inf)
    weight = (0.5 + 0.5 * np.tanh(0.5 * ahead))[..., None]  # the logistic function, which never overflows like this
    step = other_out - out
    step *= weight
    out += step
    lse[...] = merged


class Hidden(NamedTuple):
    """What is not seen in a tile: some of its keys, and what is added to their scores [keys, group · queries], 0 or −∞."""

    keys: slice
    bias: np.ndarray


KeyTiles = list[tuple[slice, "Hidden | None"]]  # the keys of a tile, and what is hidden there, None if nothing


def _tiles(q: np.ndarray, k: np.ndarray, mask: AttentionMask) -> Iterator[tuple[slice, slice, list[tuple[slice, KeyTiles]]]]:
    """Walk over what goes together: (rows, kv_heads, the blocks of queries, each with the tiles of keys that they meet).

    As many rows and KV heads go together as fill a tile; which queries and keys meet in one does not depend on that, so that a
    row's results do not depend on the others. With segments each row has a mask of its own.
    """
    kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
    query_block = max(QUERY_BLOCK, COLUMNS // group)
    one_head = max(1, min(query_block, q.shape[1]) * group * min(KEY_BLOCK, k.shape[1]))
    heads = min(kv_heads, max(1, TILE // one_head))
    together = 1 if mask.q_segments is not None or heads < kv_heads else max(1, TILE // (one_head * kv_heads))
    for rows in _blocks(q.shape[0], together):
        visible = mask.visible_tiles(rows.start, group, query_block, accumulation_dtype(q))
        for some_heads in _blocks(kv_heads, heads):
            yield rows, some_heads, visible


def _visible_tiles(
    mask: AttentionMask, row: int, group: int, query_block: int, dtype: np.dtype
) -> Iterator[tuple[slice, KeyTiles]]:
    """For each block of queries the tiles of keys in which somebody is seen, trimmed to the keys that are."""
    key_blocks = [(keys, mask.k_positions[keys]) for keys in _blocks(len(mask.k_positions), KEY_BLOCK)]
    bounds = [(keys, positions, positions.min(), positions.max()) for keys, positions in key_blocks]
    for queries in _blocks(len(mask.q_positions), query_block):
        q_positions = mask.q_positions[queries]
        key_tiles: KeyTiles = []
        first, last = q_positions.min(), q_positions.max()
        for keys, k_positions, lowest, highest in bounds:
            if lowest > last:
                continue
            if highest <= first and mask.q_segments is None:
                key_tiles.append((keys, None))
                continue
            hidden = k_positions[:, None] > q_positions
            if mask.q_segments is not None and mask.k_segments is not None:
                hidden |= mask.k_segments[row, keys, None] != mask.q_segments[row, queries]
            key_tiles += _trimmed(keys, hidden, group, dtype)
        yield queries, key_tiles


def _trimmed(keys: slice, hidden: np.ndarray, group: int, dtype: np.dtype) -> KeyTiles:
    """No tile if hidden [keys, queries] is true everywhere; else one without the keys at its ends that nobody sees."""
    seen = np.flatnonzero(~hidden.all(axis=1))
    if not len(seen):
        return []
    first, last = int(seen[0]), int(seen[-1])
    keys, hidden = slice(keys.start + first, keys.start + last + 1), hidden[first : last + 1]
    partly = np.flatnonzero(hidden.any(axis=1))
    if not len(partly):
        return [(keys, None)]
    part = slice(int(partly[0]), int(partly[-1]) + 1)
    bias = np.where(hidden[part], dtype.type(-np.inf), dtype.type(0))
    return [(keys, Hidden(part, np.tile(bias, group)))]


def _blocks(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


class _Scratch:
    """Working memory of one kernel call, in which a tile of any shape finds its place."""

    def __init__(self, like: np.ndarray) -> None:
        self.memory = empty_like(like, (0,))

    def array(self, *shape: int) -> np.ndarray:
        size = math.prod(shape)
        if size > self.memory.size:
            self.memory = empty_like(self.memory, (size,))
        return self.memory[:size].reshape(shape)


def _product(a: np.ndarray, b: np.ndarray, scratch: _Scratch, matmul: Callable[..., np.ndarray]) -> np.ndarray:
    """a [rows, kv_heads, keys, head_dim] times b [rows, kv_heads, head_dim, group · queries] as [keys, columns]."""
    tile = scratch.array(a.shape[2], b.shape[0] * b.shape[1] * b.shape[3])
    matmul(a, b, out=_by_head(tile, b))
    return tile


def _hide(tile: np.ndarray, hidden: Hidden | None) -> None:
    """Make the scores [keys, columns] of what is not seen −∞."""
    if hidden is not None:
        part = tile[hidden.keys].reshape(len(hidden.bias), -1, hidden.bias.shape[1])  # [keys, rows · kv_heads, …]
        part += hidden.bias[:, None]


def _by_kv_head(x: np.ndarray, k: np.ndarray) -> np.ndarray:
    """[batch, seq, heads, n] seen as [batch, kv_heads, group, seq, n]."""
    batch, seq, heads, width = x.shape
    return x.reshape(batch, seq, k.shape[2], heads // k.shape[2], width).transpose(0, 2, 3, 1, 4)


def _by_head(tile: np.ndarray, query: np.ndarray) -> np.ndarray:
    """[keys, columns] seen as [rows, kv_heads, keys, group · queries]; query is [rows, kv_heads, head_dim, group · queries]."""
    return tile.reshape(tile.shape[0], *query.shape[:2], query.shape[3]).transpose(1, 2, 0, 3)


def _factors(
    dropout: Dropout, rows: slice, heads: slice, queries: slice, keys: slice, group: int, dtype: np.dtype
) -> np.ndarray:
    """What dropout multiplies a tile [keys, columns] of P with; heads are KV heads."""
    factors = dropout(rows, slice(heads.start * group, heads.stop * group), queries, keys)  # [rows, heads, queries, keys]
    return factors.transpose(3, 0, 1, 2).reshape(factors.shape[3], -1).astype(dtype, copy=False)


def _taken(x: np.ndarray, rows: slice, heads: slice, queries: slice, scale: float = 1) -> np.ndarray:
    """Copy queries out of [batch, kv_heads, group, seq, n], scaled, as [rows, kv_heads, group · queries, n]."""
    tile = np.multiply(x[rows, heads, :, queries], scale, order="C")
    return tile.reshape(*tile.shape[:2], -1, tile.shape[4])


def _turned(x: np.ndarray) -> np.ndarray:
    """A copy of [rows, kv_heads, group · queries, n] as [rows, kv_heads, n, group · queries]: products with it are faster."""
    return np.ascontiguousarray(x.swapaxes(2, 3))
