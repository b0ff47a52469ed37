"""Clusters as data: levels of switches, how many children each joins, how fast and how far away; and who sits where.

    cluster   8 pods          50/7 GB/s a GPU and direction      24,576 GPUs      Llama 3 (Grattafiori et al. 2024, section 3.3.1)
    pod       192 racks       50 GB/s                             3,072
    rack      2 servers       50 GB/s                                16
    server    8 GPUs          450 GB/s                                8

Ranks are numbered as in ``refdist.comm.mesh``: tp, cp, pp, fsdp, dp, innermost first, and fill servers, racks and pods in that
order. A group of an axis crosses the smallest level that has all its members, and sends at that level's bandwidth. A user's own
cluster is a JSON file with an object of :class:`Cluster`'s fields.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from refdist.comm.mesh import AXES
from refdist.errors import ConfigError, PlanError
from refdist.paper.hardware import ACCELERATORS, Accelerator, accelerator, checked_keys, read_object

__all__ = ["CLUSTERS", "Cluster", "Crossing", "Level", "cluster"]


@dataclasses.dataclass(frozen=True)
class Level:
    """One level of a cluster.

    Attributes:
        name: such as "server".
        children: how many of the level below it joins; of accelerators, on the lowest level.
        bandwidth: bytes per second and accelerator, one direction, to others of the same unit, when all of them send at once.
        latency: seconds from the start of a message to the arrival of its first byte.
    """

    name: str
    children: int
    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        if isinstance(self.children, bool) or not isinstance(self.children, int) or self.children < 1:
            raise ConfigError(f"level {self.name!r}: children={self.children!r}: expected an integer of at least 1")
        for name in ("bandwidth", "latency"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ConfigError(f"level {self.name!r}: {name}={value!r}: expected a number above 0")


class Crossing(NamedTuple):
    """How far the members of one group are apart.

    Attributes:
        level: the smallest level that holds all of them, by number from 0; None: the group has one member.
        stride: ranks from one member to the next.
        factors: on each level, from 0 to ``level``, how many units of the level below it the members lie in; they multiply to
            the group's size.
    """

    level: int | None
    stride: int
    factors: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Accelerators and what joins them.

    Attributes:
        name: for people.
        accelerator: of which there are as many as the levels' children multiply to.
        levels: from the innermost one.
        source: where it was read.

    Raises:
        ConfigError: no levels.
    """

    name: str
    accelerator: Accelerator
    levels: tuple[Level, ...]
    source: str = ""

    def __post_init__(self) -> None:
        if not self.levels:
            raise ConfigError(f"cluster {self.name!r} has no levels")

    @property
    def size(self) -> int:
        """Accelerators in all."""
        return math.prod(level.children for level in self.levels)

    def holds(self, level: int) -> int:
        """Accelerators in one unit of a level."""
        return math.prod(below.children for below in self.levels[:level + 1])

    def flops(self, format_: str = "bf16") -> float:
        """Dense peak FLOP/s of all."""
        return self.size * self.accelerator.flops(format_)

    def bandwidth(self, level: int) -> float:
        """Bytes per second and direction between accelerators that a level is the smallest to join."""
        return min(below.bandwidth for below in self.levels[:level + 1])

    def scaled(self, compute: float = 1, network: float = 1) -> Cluster:
        """One whose accelerators compute, and whose links send, so many times as fast."""
        if compute == network == 1:
            return self
        levels = tuple(dataclasses.replace(level, bandwidth=level.bandwidth * network) for level in self.levels)
        return dataclasses.replace(self, name=f"{self.name}, compute × {compute:g}, network × {network:g}", levels=levels,
                                   accelerator=self.accelerator.scaled(compute, network))

    def check_size(self, ranks: int) -> None:
        """Raise PlanError if there are more ranks than accelerators."""
        if ranks > self.size:
            raise PlanError(f"the plan needs {ranks:,} accelerators, cluster {self.name} has {self.size:,}")

    def crossings(self, sizes: Mapping[str, int]) -> dict[str, Crossing]:
        """How far apart the members of each axis's groups are; ``sizes`` has the size of each mesh axis.

        Where some groups of an axis are spread wider than others, the widest counts: a step waits for the slowest.
        """
        found, stride = {}, 1
        for axis in AXES:
            found[axis] = self.crossing(stride, sizes[axis], math.prod(sizes.values()))
            stride *= sizes[axis]
        return found

    def crossing(self, stride: int, size: int, ranks: int) -> Crossing:
        """Of groups of ``size`` ranks, ``stride`` apart, of the first ``ranks`` ranks."""
        if size == 1:
            return Crossing(None, stride, ())
        span = stride * size
        for level in range(len(self.levels)):
            unit = self.holds(level)
            blocks = range(0, ranks, span)  # a group lies within a block of so many neighbours
            if all(first // unit == (first + span - 1) // unit for first in _different(blocks, unit)):
                return Crossing(level, stride, self._factors(stride, size, level))
        raise PlanError(f"{ranks:,} ranks do not fit cluster {self.name} of {self.size:,} accelerators")

    def _factors(self, stride: int, size: int, level: int) -> tuple[float, ...]:
        together = [min(size, max(1, self.holds(below) // stride)) for below in range(level)] + [size]
        return tuple(now / before for before, now in zip([1, *together], together, strict=False))

    def gather_seconds(self, crossing: Crossing, nbytes: float) -> float:
        """How long a group takes to gather or reduce-scatter an array of ``nbytes``, level by level (α–β model).

        On the innermost level each member moves all but its own share; on the level above what is left of the array after that is
        divided by as many as have it already: all of a unit's links are used, and each level costs (N − 1) messages.
        """
        time, share = 0.0, nbytes
        for level, factor in zip(self.levels, crossing.factors, strict=False):
            time += (factor - 1) * level.latency + share * (factor - 1) / factor / level.bandwidth
            share /= factor
        return time

    def send_seconds(self, crossing: Crossing, nbytes: float) -> float:
        """How long one member takes to send to the next one, when all do."""
        if crossing.level is None:
            return 0.0
        return self.levels[crossing.level].latency + nbytes / self.bandwidth(crossing.level)


def _different(blocks: range, unit: int) -> range:
    """The first of the blocks, as many as have different places in a unit."""
    return blocks[:unit // math.gcd(unit, blocks.step)]


NETWORK = 400e9 / 8  # bytes per second of a 400 Gb/s port

_LATENCY = "latencies are assumed: 2, 5, 8 and 12 µs"

CLUSTERS: dict[str, Cluster] = {
    "llama3": Cluster("llama3", ACCELERATORS["h100"], (
        Level("server", 8, ACCELERATORS["h100"].link or 0, 2e-6),
        Level("rack", 2, NETWORK, 5e-6),
        Level("pod", 192, NETWORK, 8e-6),
        Level("cluster", 8, NETWORK / 7, 12e-6)),
        "Grattafiori et al. 2024, section 3.3.1: 24K GPUs, 16 to a rack, 192 racks to a pod with full bisection bandwidth, "
        "8 pods, 1:7 oversubscription above; " + _LATENCY),
    "dgx-h100": Cluster("dgx-h100", ACCELERATORS["h100"], (Level("server", 8, ACCELERATORS["h100"].link or 0, 2e-6),),
                        "one server of eight; " + _LATENCY),
}
"""By short names."""


def cluster(text: str) -> Cluster:
    """By name, or from a JSON file with an object of :class:`Cluster`'s fields, the accelerator by name or as an object.

    Raises:
        ConfigError: no such name or file, or not such an object.
    """
    if text in CLUSTERS:
        return CLUSTERS[text]
    if not text.endswith(".json"):
        raise ConfigError(f"cluster {text!r}: expected one of {', '.join(CLUSTERS)}, or a .json file")
    values: dict[str, Any] = checked_keys(read_object(text), Cluster, "a cluster")
    if not isinstance(values["levels"], list):
        raise ConfigError(f"a cluster has levels={values['levels']!r}: expected a list, from the innermost one")
    levels = tuple(Level(**checked_keys(level, Level, "a level")) for level in values["levels"])
    return Cluster(**{**values, "accelerator": accelerator(values["accelerator"]), "levels": levels})
