"""When is a strategy communication-bound? Two rates and two sizes, at the border between computing and sending.

With C FLOP/s, β bytes per second and direction, w and g bytes of a parameter and of a gradient, n of an activation:

    DP      all-reduce 2 g Ψ/β   behind   backward 4 Ψ T/C             bound below   T = g C / 2β        tokens a rank and step
    FSDP    (2 w + g) Ψ/β        behind   forward, backward 6 Ψ T/C    bound below   T = (2 w + g) C / 6β   a micro-batch
    TP      8 n T h (t − 1)/t β  of a block, against 6 P T/(t C)       as long from  t = 1 + 6 P β / 8 n h C   ranks on

T is the tokens that one rank computes on, P the numbers in a block's matrices, h the hidden size; (N − 1)/N is taken as 1, and
Ψ cancels: how big the model is does not matter to DP and FSDP, how many tokens there are does not matter to TP. Every border is
C/β, the machine's balance, times sizes: where compute grows 3 times and bandwidth 2 times, each moves by 3/2 the wrong way.
"""

from __future__ import annotations

from typing import NamedTuple

from refdist.model.config import ModelConfig
from refdist.model.layout import layout
from refdist.paper.cluster import Cluster
from refdist.paper.state import Stored

__all__ = ["Border", "borders"]


class Border(NamedTuple):
    """Where strategies become communication-bound, if their groups cross one level of a cluster.

    Attributes:
        level: its name.
        bandwidth: bytes per second and direction.
        dp: tokens a rank and step below which an all-reduce lasts longer than backward.
        fsdp: tokens a rank and micro-batch below which gathers and reduce-scatters last longer than forward and backward.
        tp: ranks above which a block's communication lasts longer than its matrix products.
        tp_share: with as many tp ranks as a server has accelerators, communication as a part of a block's matrix products.
    """

    level: str
    bandwidth: float
    dp: float
    fsdp: float
    tp: float
    tp_share: float


def borders(config: ModelConfig, stored: Stored, cluster: Cluster, format_: str = "bf16",
            efficiency: float = 1.0) -> list[Border]:
    """The borders on each level of a cluster; ``efficiency`` of the peak is taken as reached."""
    rate = cluster.accelerator.flops(format_) * efficiency
    block = sum(row.shape[0] * row.shape[1] for row in layout(config).values() if row.layer == 0 and len(row.shape) == 2)
    ranks = cluster.levels[0].children
    found = []
    for number, level in enumerate(cluster.levels):
        beta = cluster.bandwidth(number)
        more = 8 * stored.activation * config.hidden_size * rate / (6 * block * beta)  # each tp rank more, of what it computes
        found.append(Border(level.name, beta, stored.reduced * rate / (2 * beta),
                            (2 * stored.parameter + stored.reduced) * rate / (6 * beta), 1 + 1 / more, (ranks - 1) * more))
    return found
