"""When a parallel gradient counts as equal to the single device's, and what is said when it does not.

In float64, element by element,   |parallel - single|  <=  1e-10 · max(max|single| of that parameter, 1e-3 · max|single| of all)

The ratio parallel/single (a least-squares fit) names many a bug: 1/dp, tp, the number of micro-batches, √2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

__all__ = ["BOUND", "Difference", "Wanted", "differences", "flat", "require_equal"]

BOUND = 1e-10
_SMALL = 1e-3  # a parameter's scale is at least this part of the largest one


@dataclass(frozen=True)
class Difference:
    """How far one array of a dictionary is from what it should be.

    Attributes:
        name: of the parameter.
        largest: absolute difference; relative: the same over the parameter's scale; ratio: parallel/single.
    """

    name: str
    largest: float
    relative: float
    ratio: float

    def __str__(self) -> str:
        return (f"{self.name}: differs by {self.largest:.3g}, {self.relative:.3g} of its scale; "
                f"parallel/single = {self.ratio:.12g}")


def differences(got: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray], bound: float = BOUND) -> list[Difference]:
    """The parameters that differ by more than ``bound`` of their scale, the worst first; NaN differs."""
    scales = {name: float(np.max(np.abs(array), initial=0.0)) for name, array in wanted.items()}
    least = max(scales.values(), default=0.0) * _SMALL
    found = []
    for name, single in wanted.items():
        parallel = np.asarray(got[name], np.float64)
        largest = float(np.max(np.abs(parallel - single), initial=0.0))
        scale = max(scales[name], least)
        if not largest <= bound * scale:
            square = float(np.vdot(single, single))
            ratio = float(np.vdot(single, parallel)) / square if square else np.nan
            found.append(Difference(name, largest, largest / scale if scale else np.inf, ratio))
    return sorted(found, key=lambda row: -np.nan_to_num(row.relative, nan=np.inf))


def require_equal(got: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray], what: str, bound: float = BOUND) -> None:
    """AssertionError naming each parameter that differs, unless names and shapes are the same and every number is near enough."""
    assert list(got) == list(wanted), f"{what}: names {list(got)}, expected {list(wanted)}"
    for name in wanted:
        assert got[name].shape == wanted[name].shape, f"{what}: {name} has shape {got[name].shape}, expected {wanted[name].shape}"
    wrong = differences(got, wanted, bound)
    if wrong:
        lines = "\n  ".join(map(str, wrong))
        raise AssertionError(f"{what}: {len(wrong)} of {len(wanted)} parameters differ from the single device\n  {lines}")


class Wanted:
    """The single device's arrays by name. Holding others against them is one operation on all numbers at once.

    Args:
        arrays: in float64.
        bound: of the difference, as a part of a parameter's scale.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], bound: float = BOUND) -> None:
        self.arrays = arrays
        self.bound = bound
        scales = [float(np.max(np.abs(array), initial=0.0)) for array in arrays.values()]
        least = max(scales, default=0.0) * _SMALL
        sizes = [array.size for array in arrays.values()]
        self._shapes = [(name, array.shape) for name, array in arrays.items()]
        self._numbers = flat(arrays)
        self._allowed = np.repeat([bound * max(scale, least) for scale in scales], sizes)  # [all numbers]

    def require(self, got: Mapping[str, np.ndarray], what: Callable[[], str]) -> None:
        """AssertionError naming each parameter that differs; ``what()`` says of which arrays."""
        comparable = [(name, array.shape) for name, array in got.items()] == self._shapes
        if comparable and (np.abs(flat(got) - self._numbers) <= self._allowed).all():
            return
        require_equal(got, self.arrays, what(), self.bound)
        raise AssertionError(f"{what()}: differ, and no parameter does")


def flat(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """All numbers of all arrays, one after the other."""
    return np.concatenate([array.reshape(-1) for array in arrays.values()]) if arrays else np.empty(0)
