"""Pictures of context parallelism: which rank computes which block of the attention matrix at which step, seen in a real run.

    >>> from refdist.parallel.context.tracing import trace
    >>> print(trace(cp=2, method="ring"))                                                            # doctest: +SKIP

A device that listens notes the positions of queries and keys of every attention kernel that the ranks run; nothing here knows how
a method works.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from refdist import ops
from refdist.comm import Comm, Mesh, run
from refdist.device import Device
from refdist.model.config import ModelConfig
from refdist.parallel import context
from refdist.parallel.plan import Plan

__all__ = ["AttentionTrace", "Block", "trace"]

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#994455")
SIDE = 44  # of a block in an SVG picture


class Block(NamedTuple):
    """One rank's work on a block of the attention matrix, at one step.

    Attributes:
        rank, step: who, and at which step of its group's ring (0 without one).
        heads: first head, and the one after the last.
        queries, keys: numbers of chunks of the sequence.
        pairs: (query, key) pairs that the mask lets through, in each head.
    """

    rank: int
    step: int
    heads: tuple[int, int]
    queries: int
    keys: int
    pairs: float


@dataclass(frozen=True)
class AttentionTrace:
    """What the ranks of a context-parallel group compute.

    Attributes:
        title: the method and its options.
        ranks, steps: how many.
        chunks: where each chunk of the sequence begins, and its end.
        blocks: in the order of ranks and steps.
    """

    title: str
    ranks: int
    steps: int
    chunks: tuple[int, ...]
    blocks: tuple[Block, ...]

    @property
    def work(self) -> np.ndarray:
        """Pairs times heads, float64 [ranks, steps]."""
        total = np.zeros((self.ranks, self.steps))
        for block in self.blocks:
            total[block.rank, block.step] += block.pairs * (block.heads[1] - block.heads[0])
        return total

    def matrices(self) -> Iterator[tuple[tuple[int, int], dict[tuple[int, int], Block]]]:
        """For each set of heads that is computed together: (query chunk, key chunk) -> block."""
        for heads in sorted({block.heads for block in self.blocks}):
            yield heads, {(block.queries, block.keys): block for block in self.blocks if block.heads == heads}

    def __str__(self) -> str:
        count = len(self.chunks) - 1
        lines = [self.title, "in a block: rank.step; rows are chunks of queries, columns are chunks of keys", ""]
        for heads, blocks in self.matrices():
            lines.append(f"heads {heads[0]} to {heads[1] - 1}")
            lines.append("      " + "".join(f"{chunk:>5}" for chunk in range(count)))
            for row in range(count):
                cells = (blocks.get((row, column)) for column in range(count))
                lines.append(f"{row:>6}" + "".join("    ·" if cell is None else f"{cell.rank:>3}.{cell.step}" for cell in cells))
            lines.append("")
        work = self.work
        scale = 12 / max(work.max(), 1)
        for rank in range(self.ranks):
            bars = " ".join("█" * round(value * scale) or "·" for value in work[rank])
            share = work[rank].sum() / work.sum() if work.any() else 0.0
            lines.append(f"rank {rank}  {work[rank].sum():>8,.0f} pairs  {share:>6.1%}   steps: {bars}")
        return "\n".join(lines)

    def svg(self) -> str:
        """The same as a picture: a colour for each rank, the step in each block, and bars of the work below."""
        side = (len(self.chunks) - 1) * SIDE
        parts = [_text(10, 22, self.title, "start", 16),
                 _text(10, 44, "a colour for each rank; the number in a block is the step at which it is computed", "start")]
        panels = list(self.matrices())
        across = min(len(panels), 2 if len(panels) < 7 else 4)
        for number, (heads, blocks) in enumerate(panels):
            left, above = 10 + number % across * (side + 30), 62 + number // across * (side + 44)
            parts.append(_text(left, above + 10, f"heads {heads[0]} to {heads[1] - 1}: queries down, keys across", "start"))
            for (row, column), block in blocks.items():
                x, y = left + column * SIDE, above + 20 + row * SIDE
                parts.append(_box(x, y, SIDE - 2, SIDE - 2, _colour(block.rank), f"rank {block.rank}, step {block.step}"))
                parts.append(_text(x + SIDE / 2 - 1, y + SIDE / 2 + 4, str(block.step)))
        top = 62 + -(-len(panels) // across) * (side + 44)
        width = max(across * (side + 30), 560)
        parts.append(_text(10, top + 4, "work: unmasked (query, key) pairs × heads, step by step", "start"))
        work = self.work
        top += 14
        scale = (width - 190) / max(work.sum(axis=1).max(), 1)
        for rank, total in enumerate(work.sum(axis=1)):
            end = 70.0
            parts.append(_text(10, top + 15, f"rank {rank}", "start"))
            for step, value in enumerate(work[rank]):
                parts.append(_box(end, top, max(value * scale - 1, 0), 20, _colour(rank), f"step {step}: {value:,.0f} pairs"))
                end += value * scale
            parts.append(_text(end + 8, top + 15, f"{total:,.0f} ({total / (work.sum() or 1):.1%})", "start"))
            top += 26
        return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top + 10}" font-family="sans-serif" '
                f'font-size="13">\n<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n")


def trace(cp: int = 4, method: str = "ring", layout: str = "zigzag", ulysses: int = 1, seq: int | None = None, heads: int = 8,
          kv_heads: int = 4) -> AttentionTrace:
    """Run one attention forward on ``cp`` ranks in this process, and see who computes what.

    Args:
        cp, method, layout, ulysses: as the fields ``cp``, ``cp_method``, ``cp_layout`` and ``cp_ulysses`` of a plan.
        seq: length of the sequence; None: four positions a chunk.
        heads, kv_heads: of the attention.

    Raises:
        PlanError: the heads cannot be dealt out to the ranks.
    """
    fields: dict[str, Any] = {"cp_method": method, "cp_layout": layout}
    plan = Plan(cp=cp, cp_ulysses=ulysses, **fields)
    config = ModelConfig(2, 2, 2, 1, heads, kv_heads, head_dim=2)
    context.check(config, plan)
    seq = 8 * cp if seq is None else seq
    where = context.positions(seq, cp, layout, cp if method == "ulysses" else ulysses)
    second = [own[(len(own) + 1) // 2:] for own in where] if layout == "zigzag" else []
    starts = sorted({int(chunk[0]) for chunk in (*where, *second) if len(chunk)} | {seq})

    def program(comm: Comm) -> list[Block]:
        device = _Noting()
        sequence = context.Sequence(config, plan, Mesh(comm, cp=cp, device=device), device, context.METHODS)
        own = np.empty((1, len(sequence.positions(seq)), heads, 2))
        own[...] = 1
        sequence.attention(seq).forward(own, own[:, :, :kv_heads].copy(), own[:, :, :kv_heads].copy())
        first = sequence.within.rank * (heads // sequence.exchanging)
        parts = [set(own.tolist()) for own in context.Chunks.of(where, None).grouped(sequence.exchanging).positions]
        blocks: list[Block] = []
        for mask, here in device.seen:
            owners = [part for part, held in enumerate(parts) if held & set(mask.k_positions.tolist())]
            step = (sequence.between.rank - owners[0]) % len(parts) if len(owners) == 1 else 0
            blocks += _blocks(comm.rank, step, (first, first + here), mask, starts)
        return blocks

    found = [block for blocks in run(program, ranks=cp) for block in blocks]
    joined = f" between groups of {ulysses} that exchange heads" if ulysses > 1 and method != "ulysses" else ""
    title = f"{method} attention{joined}, {layout}, {cp} ranks, {seq} positions"
    return AttentionTrace(title, cp, max(block.step for block in found) + 1, tuple(starts), tuple(found))


class _Noting(Device):
    """A device that notes the mask and the number of heads of every attention kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[ops.AttentionMask, int]] = []

    def call(self, kernel: Any, *args: Any, category: str = "activation", **kwargs: Any) -> Any:
        if kernel is ops.attention:
            self.seen.append((args[3], args[0].shape[2]))
        return super().call(kernel, *args, category=category, **kwargs)


def _blocks(rank: int, step: int, heads: tuple[int, int], mask: ops.AttentionMask, starts: list[int]) -> Iterator[Block]:
    """A kernel's work, chunk by chunk; blocks in which no query sees a key are left out."""
    for row, (q_start, q_end) in enumerate(pairwise(starts)):
        queries = mask.q_positions[(mask.q_positions >= q_start) & (mask.q_positions < q_end)]
        for column, (k_start, k_end) in enumerate(pairwise(starts)):
            keys = mask.k_positions[(mask.k_positions >= k_start) & (mask.k_positions < k_end)]
            pairs = ops.AttentionMask(queries, keys).visible_pairs
            if pairs:
                yield Block(rank, step, heads, row, column, pairs)


def _colour(rank: int) -> str:
    return COLOURS[rank % len(COLOURS)]


def _box(x: float, y: float, width: float, height: float, colour: str, title: str) -> str:
    return (f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}">'
            f"<title>{title}</title></rect>")


def _text(x: float, y: float, words: str, anchor: str = "middle", size: int = 13) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{words}</text>'
