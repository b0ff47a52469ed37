"""Context parallelism: the sequence is cut across ranks; only attention looks beyond a rank's own part.

Every layer but attention treats positions alone, so a rank runs it on its chunk as it is. Four ways to attend stand behind one
interface (:class:`refdist.model.seams.SequenceAttention`): ``ring.py``, ``all_gather.py``, ``ulysses.py``, and the first two
between groups that exchange heads within.
"""

from types import ModuleType

from refdist.parallel.context import all_gather, ring, ulysses
from refdist.parallel.context.chunks import LAYOUTS, Chunks, positions
from refdist.parallel.context.sequence import Sequence, check

METHODS: dict[str, ModuleType] = {"ring": ring, "all_gather": all_gather, "ulysses": ulysses}
"""The ways to attend, by the names of plans."""

__all__ = ["LAYOUTS", "METHODS", "Chunks", "Sequence", "check", "positions"]
