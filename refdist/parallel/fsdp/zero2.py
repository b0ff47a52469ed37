"""ZeRO 2: as ZeRO 1, but a rank keeps its own rows of the gradients only.

    backward     ▇ head ▇ layer 3 ▇ layer 2 ▇ …          every micro-batch
    network             ░░ head ░░░ layer 3 ░░ …         reduce-scatter
    own rows               += head    += layer 3 …

Whole gradients cannot be accumulated where only rows are kept, so that each micro-batch is reduced on its own: m times the bytes
for m micro-batches (Rajbhandari et al. 2020, section 5.2). A gradient lives from its kernel to the end of its reduce-scatter; of
at most two layers they are alive at once.

In rank order with several micro-batches the grouping is that of data parallelism: first over a rank's micro-batches, then over
the ranks. So each rank's contributions are exchanged unsummed (an all-to-all, as many bytes as a reduce-scatter), and the owner
keeps one sum for each rank until the step ends: as much memory as whole gradients. The two uses of a tied matrix are kept apart
as well, and travel apart.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from refdist.model.layout import EMBEDDING, HEAD
from refdist.numerics.rounding import store
from refdist.ops import add
from refdist.parallel.fsdp import zero1
from refdist.parallel.fsdp.zero1 import Scattering
from refdist.parallel.stage import Piece

__all__ = ["Storage"]


class Storage(zero1.Storage):
    """Whole parameters, gradients by rows."""

    def _make_gradients(self) -> None:
        _, self.gradients = self._lay_out({name: self.shard(name) for name in self.rows}, "gradient", self.accumulation)

    def begin_step(self, micro_batches: int) -> None:
        """Forget the gradients of the step before; so many micro-batches will follow."""
        super().begin_step(micro_batches)
        self._apart = self.plan.order == "rank" and micro_batches > 1
        self._micro_batches = micro_batches
        self._missing = dict.fromkeys(self.rows, micro_batches)
        self._whole: defaultdict[str, deque[np.ndarray]] = defaultdict(deque)  # gradients until their piece's are complete
        self._by_rank: dict[str, np.ndarray] = {}  # name -> [rank · own rows, …]: the sum of each rank's micro-batches

    def add(self, name: str, kernel: Callable[..., Any], *args: Any) -> None:
        """Compute a weight gradient; with the others of its piece it will be reduced."""
        gradient = self.device.call(kernel, *args, category="gradient")
        if name not in self.rows and not self._apart:  # the head's use of a tied matrix waits for the embedding's
            self._head = self._first_term(gradient) if self._head is None else add(self._head, gradient)
            return
        if name == EMBEDDING and self._head is not None:
            gradient = add(self._first_term(gradient), self._head)
            self._head = None
        if self._apart:  # each rank's terms go to the owners of their rows: [own rows of rank 0, then of rank 1, …]
            work = self.group.start("all_to_all", self._travelling(gradient), label=f"exchange of {name}")
            self._scattering.append(Scattering([name], [], [work]))
            self._untouched.discard(name)
        else:
            self._whole[name].append(gradient)

    def _collect(self) -> None:
        """The oldest reduce-scatter or exchange ends."""
        if not self._apart:
            super()._collect()
            return
        (name,), _, (work,) = self._scattering.popleft()
        terms = work.wait()
        if name in self._by_rank:
            add(self._by_rank[name], terms)
        else:
            self._by_rank[name] = self.device.copy(terms, "gradient", self.accumulation)

    def _take(self, name: str, summed: np.ndarray) -> None:
        """Rows that have been summed over the group are added to what earlier micro-batches gave."""
        total = self.gradients[name]
        if self._missing[name] == self._micro_batches:
            if summed is not total:
                store(summed, total)
        else:
            add(total, summed)
        self._missing[name] -= 1
        if not self._missing[name]:
            self._reduce_over_replicas(name)

    def done(self, piece: Piece) -> None:
        """A piece's gradients of a micro-batch are complete: their reduce-scatter starts, and that of the piece before ends."""
        self._remaining[piece] -= 1
        if not self._apart:
            names = self.names(piece)
            sums = [self.gradients[name] if name in self._untouched
                    else self.device.empty(self.gradients[name], None, "communication") for name in names]
            self._start_scatter(piece, {name: self._whole[name].popleft() for name in names}, sums)
            self._untouched.difference_update(names)
        self._collect_earlier()

    def reduce(self) -> None:
        """Wait until this rank's rows have been summed over all ranks: called once, after the last micro-batch."""
        while self._scattering:
            self._collect()
        if self._apart:
            self._add_in_rank_order()
        super().reduce()

    def _add_in_rank_order(self) -> None:
        head = self._by_rank.pop(HEAD, None) if HEAD not in self.rows else None
        for name, by_rank in self._by_rank.items():
            if head is not None and name == EMBEDDING:
                add(by_rank, head)
            total = self.gradients[name]
            contributions = by_rank.reshape(self.group.size, *total.shape)
            np.copyto(total, contributions[0])
            for contribution in contributions[1:]:
                add(total, contribution)
            self._reduce_over_replicas(name)
        self._by_rank.clear()
