"""Activations on paper: bytes that blocks keep for backward, how many are in flight, and what works beside them.

For b sequences of a micro-batch, of which a rank has s positions (s/t of the residual stream with sequence parallelism over t
tensor-parallel ranks), n bytes a number and n' a statistic, a block keeps, with this rank's heads and its part of the MLP:

    x, middle            2 · n·sb·hidden / t        GPT of Korthikanti et al. 2022, section 4:    4 of the norms' inputs (their
                                                                                                  outputs, 2 + 2, are made again)
    q, attended          2 · n·sb·heads·head_dim                                                  2 of Q, 2 of o's input
    k, v                 2 · n·sb·kv_heads·head_dim                                               2 + 2 (grouped: fewer)
    gate, up             2 · n·sb·ffn                                                             8 + 8 of GeLU
    norm statistics      2 · n'·sb / t                                                            –
    log-sum-exp              n'·sb·heads                                                          5as/h: scores and their dropout

Norm outputs and silu(gate)·up are made again; no dropout mask is kept (Philox draws it again), no [s, s] matrix (an online
softmax needs none). ``selective`` drops attended and the log-sum-exp, ``full`` all but the x of each group of blocks.

How many blocks are in flight follows from the schedule: stage i of 1F1B has min(p − i, m) micro-batches, GPipe m. ``peak`` walks
a stage's actions and adds up what is kept, what waits for a message, and what one block needs while it runs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

from refdist.ops.cross_entropy import LOGITS
from refdist.paper.part import Part
from refdist.paper.state import Stored
from refdist.parallel.context.sequence import exchanging
from refdist.parallel.pipeline.action import Action
from refdist.parallel.pipeline.catalog import SCHEDULES
from refdist.parallel.stage import Piece

__all__ = ["Activations", "korthikanti"]


class Activations:
    """Activations of one rank, by the number of sequences in a micro-batch.

    Args:
        part: of the rank.
        stored: bytes a number and a statistic.
    """

    def __init__(self, part: Part, stored: Stored) -> None:
        self.part, self.plan = part, part.plan
        self.n, self.statistic = stored.activation, stored.statistic
        self.hidden, self.head_dim = part.config.hidden_size, part.config.head_dim
        self.cut = self.plan.tp > 1 and self.plan.sequence_parallel

    # ------------------------------------------------------------------------------------------- arrays, in bytes

    def residual(self, b: int) -> int:
        """x [b, residual positions, hidden]."""
        return b * self.part.residual * self.hidden * self.n

    def whole(self, b: int) -> int:
        """What column-parallel layers multiply with, [b, positions, hidden]."""
        return b * self.part.positions * self.hidden * self.n

    def mlp(self, b: int) -> int:
        """gate, up, or their product, [b, positions, ffn]."""
        return b * self.part.positions * self.part.ffn * self.n

    def heads(self, b: int, heads: int) -> int:
        """[b, positions, heads, head_dim] of this rank."""
        return b * self.part.positions * heads * self.head_dim * self.n

    def terms(self, b: int) -> dict[str, int]:
        """What a block keeps with recompute="none", array by array."""
        positions, q_heads, kv_heads = self.part.exchange
        there = b * positions * self.head_dim * self.n
        norm = b * self.part.residual * self.statistic
        apart = exchanging(self.plan) > 1  # attention's own output is in another layout than what o multiplies with
        gathered = 2 * self.whole(b) if self.plan.save_gathered and self.cut else 0
        return {"x, middle": 2 * self.residual(b), "norm statistics": 2 * norm,
                "q": q_heads * there, "k, v": 2 * kv_heads * there,
                "attended": q_heads * there + (self.heads(b, self.part.q_heads) if apart else 0),
                "log-sum-exp": b * positions * q_heads * self.statistic, "gate, up": 2 * self.mlp(b),
                "gathered norm outputs": gathered}

    def kept(self, b: int, number: int) -> int:
        """What stays until backward of block ``number`` of a chunk."""
        if self.plan.recompute == "full":
            return self.residual(b) if number % self.plan.recompute_blocks == 0 else 0
        terms = self.terms(b)
        dropped = ("attended", "log-sum-exp") if self.plan.recompute == "selective" else ()
        return sum(size for name, size in terms.items() if name not in dropped)

    # ---------------------------------------------------------------------------------- what one piece needs at most

    def in_forward(self, b: int) -> int:
        """While a block's forward ends: all that it would keep, the norm's output, silu(gate)·up, and y."""
        return sum(self.terms(b).values()) + self._gathered(b) + self._exchanged(b) + self.mlp(b) + self._summed(b)

    def in_backward(self, b: int) -> int:
        """While a block's backward makes dn, the gradient of what q, k and v were given.

        Counted: all that was kept, both norms' outputs, da, dn of the MLP, dmiddle, dattended, dq, dk, dv, and dn; not dy.
        """
        norms = 2 * self._gathered(b) + (self.residual(b) if self.cut and not self.plan.save_gathered else 0)
        attention = self.heads(b, 2 * self.part.q_heads + 2 * self.part.kv_heads)
        gradients = 2 * self.residual(b) + 3 * self.whole(b) if self.cut else self.residual(b) + self.whole(b)
        last = max(self.whole(b), self._exchanged(b, backward=True))  # what attention itself needs is gone before dn
        return sum(self.terms(b).values()) + norms + self.mlp(b) + attention + gradients + last

    def in_head(self, b: int) -> int:
        """While the head runs, x included: norm, its gradient, and the logits of one or two chunks of tokens."""
        part, tokens = self.part, b * self.part.positions
        base = self.residual(b) + 2 * self.whole(b) + b * part.residual * self.statistic
        base += self.residual(b) if self.cut else 0
        columns = -(-part.config.vocab_size // self.plan.tp)
        chunk = min(tokens, max(1, LOGITS // columns))
        rest = tokens - chunk
        last = tokens - (tokens - 1) // chunk * chunk if tokens else 0

        def logits(count: int) -> int:
            return count * (part.columns * self.n + 2 * self.statistic)

        split = 2 * chunk * self.statistic if self.plan.tp > 1 else 0  # each rank's own log-sum-exp, to be exchanged
        during = logits(chunk) + max(chunk * self.hidden * self.n, split)
        if rest:
            during = max(during, logits(chunk) + logits(min(rest, chunk)) + split)
        after = logits(last) + self.residual(b) * (2 if self.cut else 1)
        return base + max(during, after)

    def for_weights(self, b: int) -> int:
        """What a block keeps between its input gradient and its weight gradients: both factors of each matrix product."""
        part = self.part
        heads = self.heads(b, 2 * part.q_heads + 2 * part.kv_heads)
        return 3 * self.mlp(b) + heads + 4 * self.whole(b)

    def _gathered(self, b: int) -> int:
        """The output of a norm as the layers after it multiply with it, unless it is kept anyway."""
        return 0 if self.plan.save_gathered and self.cut else self.whole(b)

    def _summed(self, b: int) -> int:
        """What a row-parallel layer gave, before and after it is summed."""
        return self.whole(b) + (self.residual(b) if self.cut else 0)

    def _exchanged(self, b: int, backward: bool = False) -> int:
        """Further arrays of context parallelism: q, k, v or their gradients in two layouts; terms of the ring."""
        positions, q_heads, kv_heads = self.part.exchange
        there = b * positions * self.head_dim * self.n
        here = self.heads(b, self.part.q_heads + 2 * self.part.kv_heads)
        extra = 0
        if exchanging(self.plan) > 1:
            extra += here if not backward else (2 * q_heads + 2 * kv_heads) * there
            if backward and self.statistic > self.n and self.plan.cp == exchanging(self.plan):
                extra += q_heads * there
        if backward and self.plan.cp > exchanging(self.plan) and self.plan.cp_method == "ring":
            steps = self.plan.cp // exchanging(self.plan) - 1
            wide = self.statistic * b * self.head_dim  # the terms of sums, and the sums
            widest = max(self.part.lengths) * exchanging(self.plan)  # positions of any rank's keys
            extra += min(2, steps) * q_heads * positions * wide + min(3, steps) * 2 * kv_heads * widest * wide
            extra += (q_heads + 2 * kv_heads) * positions * wide if self.statistic > self.n else 0
        if backward and self.plan.cp > exchanging(self.plan) and self.plan.cp_method == "all_gather":
            wide = self.statistic * b * self.head_dim
            extra += 2 * kv_heads * self.part.seq * wide + (q_heads * positions * wide if self.statistic > self.n else 0)
        return extra

    # ----------------------------------------------------------------------------------------------- along the schedule

    def quick(self) -> tuple[int, int]:
        """As :meth:`walk`, by the formula of the schedule's paper, rounded up: no action is looked at."""
        part, plan = self.part, self.plan
        entry = SCHEDULES[plan.schedule]
        flying = entry.peak[1](plan.pp, plan.micro_batches, plan.virtual_stages, part.at["pp"])
        b = max(part.sequences)
        stage = self.residual(b) if part.has("head") else 0
        stage += sum(self.kept(b, number) for chunk in part.chunks for number in range(sum(map(_is_block, chunk))))
        kept = math.ceil(min(flying, plan.micro_batches) * stage)
        working = max(self.in_backward(b), self.in_forward(b), self.in_head(b) if part.has("head") else 0)
        return kept, kept + working + 3 * self.residual(b)

    def walk(self) -> tuple[int, int]:
        """The most bytes that are kept for backward between two actions of this rank's stage, and the most alive at once.

        The latter, with what the running piece needs, is exactly the emulator's, where neither the sequence nor the residual
        stream is cut (cp = 1; tp = 1 or sequence_parallel=False), nothing is dropped out, and sends are buffered. Where it is
        cut, when buffers come back depends on when messages arrive, and this is an upper bound.
        """
        return _Walk(self).run()


def _is_block(piece: Piece) -> bool:
    return isinstance(piece, int)


class _Walk:
    """Follows one stage's actions and messages, as ``refdist.parallel.pipeline.executor`` runs them."""

    def __init__(self, activations: Activations) -> None:
        self.of = activations
        self.part = activations.part
        self.live = self.kept = self.most_kept = self.most = 0
        self.stacks: defaultdict[int, list[int]] = defaultdict(list)  # micro-batch -> bytes of each entry
        self.apart: dict[tuple[int, int], int] = {}  # (micro-batch, chunk) -> bytes between I and W

    def run(self) -> tuple[int, int]:
        """The most that is kept, and the most that is alive."""
        part = self.part
        do: dict[str, Callable[[Action, int], None]] = {"F": self._forward, "B": self._backward, "I": self._backward,
                                                        "W": self._weights}
        for step in part.program:
            b = part.sequences[step.micro_batch]
            if isinstance(step, Action):
                do[step.kind](step, b)
                self.kept = sum(map(sum, self.stacks.values())) + sum(self.apart.values())
                self.most_kept = max(self.most_kept, self.kept)
            else:
                self.live += self.of.residual(b) * (-1 if step.kind == "send" else 1)
                self._seen()
        return self.most_kept, self.most

    def _seen(self, more: int = 0) -> None:
        self.most = max(self.most, self.live + more)

    def _push(self, stack: list[int], size: int) -> None:
        stack.append(size)
        self.live += size

    def _forward(self, action: Action, b: int) -> None:
        of, stack, pieces = self.of, self.stacks[action.micro_batch], self.part.chunks[action.chunk]
        if "embed" in pieces:
            self._seen(of._summed(b))
        else:
            self.live -= of.residual(b)  # its x, which the first block counts
        first = len(stack)
        for piece in pieces:
            if isinstance(piece, int):
                self._seen(of.in_forward(b))
                self._push(stack, of.kept(b, len(stack) - first))
            elif piece == "head":
                self._seen(of.in_head(b))
                self._push(stack, of.residual(b))
        if "head" not in pieces:
            self.live += of.residual(b)  # y, for the next chunk
        self._seen()

    def _backward(self, action: Action, b: int) -> None:
        of, stack, pieces = self.of, self.stacks[action.micro_batch], self.part.chunks[action.chunk]
        self.live -= stack.pop() if "head" in pieces else of.residual(b)  # dy, which the blocks count
        whole, dy, later = sum(of.terms(b).values()), of.residual(b), 0
        blocks = sum(isinstance(piece, int) for piece in pieces)
        together, base = self.part.plan.recompute_blocks, len(stack) - blocks
        for place in reversed(range(blocks)):
            if self.part.plan.recompute == "full" and (place == blocks - 1 or place % together == together - 1):
                self._again(stack, base + place // together * together, b, dy, whole)
            self.live -= stack.pop()
            self._seen(dy + of.in_backward(b))
            if action.kind == "I":
                self.live += of.for_weights(b)
                later += of.for_weights(b)
        if "embed" in pieces:
            self._seen(dy + (of.whole(b) if of.cut else 0))
        else:
            self.live += dy
        if action.kind == "I":
            self.apart[action.micro_batch, action.chunk] = later
        self._seen()

    def _again(self, stack: list[int], first: int, b: int, dy: int, whole: int) -> None:
        """The forward of the blocks from ``first`` on once more: afterwards all of them is kept."""
        for place in range(first, len(stack)):
            self.live -= stack[place]
            self._seen(dy + self.of.in_forward(b))
            stack[place] = whole
            self.live += whole

    def _weights(self, action: Action, b: int) -> None:
        self.live -= self.apart.pop((action.micro_batch, action.chunk))


def korthikanti(s: int, b: int, h: int, a: int, t: int = 1, sequence_parallel: bool = False, recompute: str = "none") -> float:
    """Bytes of a GPT layer's activations in 16 bits under its paper's assumptions (Korthikanti et al. 2022, table 2).

    GeLU, an MLP of 4h, multi-head attention that keeps its [s, s] scores, dropout masks of one byte.

    Args:
        s, b, h, a: sequence, micro-batch, hidden size, heads.
        t: tensor-parallel ranks.
        sequence_parallel: whether norms and dropout are cut too.
        recompute: "none", "selective" (scores are made again), or "full".
    """
    if recompute == "full":
        return 2 * s * b * h
    scores = 0 if recompute == "selective" else 5 * a * s / (h * t)
    return s * b * h * ((34 / t if sequence_parallel else 10 + 24 / t) + scores)
