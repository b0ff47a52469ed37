"""SGD with momentum, and AdamW. Each update is written out, in place, block by block, so that its passes stay in the cache.

An optimizer knows nothing of ranks: it is given a parameter (or a shard of one), its gradient and its state, and changes
parameter and state. Element by element the result does not depend on how a parameter is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np

from refdist.numerics.rounding import store, widened

__all__ = ["SGD", "AdamW", "LearningRate", "Optimizer"]

LearningRate: TypeAlias = float | Callable[[int], float]
_BLOCK = 32768  # elements: parameter, gradient, two moments and two temporaries fit the second-level cache


class Optimizer:
    """What a trainer needs of an optimizer.

    Attributes:
        lr: learning rate, or a function of the step number (from 1).
        weight_decay: factor of the decay term; parameters with fewer than two dimensions (norms, biases) are not decayed
            unless ``decay_all``.
        elementwise: whether a class, not one above it, says that its update takes each element by itself. Then it may be given
            several parameters of as many dimensions at once, joined into flat arrays.
        state_names: names of the state arrays, each of the parameter's shape, in its dtype or float32 if it has 16 bits, that
            start as zeros.
    """

    elementwise: bool = False
    state_names: tuple[str, ...] = ()

    def __init__(self, lr: LearningRate, weight_decay: float, decay_all: bool) -> None:
        if not callable(lr) and not (isinstance(lr, (int, float, np.number)) and math.isfinite(lr) and lr >= 0):
            raise ValueError(f"lr={lr!r}: expected a number of at least 0, or a function of the step")
        if not (math.isfinite(weight_decay) and weight_decay >= 0):
            raise ValueError(f"weight_decay={weight_decay!r}: expected a number of at least 0")
        self.lr = lr
        self.weight_decay = weight_decay
        self.decay_all = decay_all

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, counted from 1; ValueError if a function gives no number of at least 0."""
        if not callable(self.lr):
            return float(self.lr)
        rate = float(self.lr(step))
        if not 0 <= rate < math.inf:
            raise ValueError(f"lr({step})={rate!r}: expected a number of at least 0")
        return rate

    def decay(self, ndim: int) -> float:
        """The weight decay of a parameter whose global shape has ``ndim`` dimensions."""
        return self.weight_decay if ndim >= 2 or self.decay_all else 0.0

    def update(self, parameter: np.ndarray, gradient: np.ndarray, state: tuple[np.ndarray, ...], step: int, ndim: int,
               scale: float = 1.0) -> None:
        """Change ``parameter`` and ``state`` in place.

        Args:
            parameter, gradient, state: C-contiguous, of one shape; parameter and gradient may have 16 bits.
            step: from 1.
            ndim: dimensions of the whole parameter's shape, of which this may be a flat shard, or, joined, several.
            scale: the gradient is multiplied by it first (clipping, 1 / loss scale).
        """
        rate, decay = self.learning_rate(step), self.decay(ndim)
        for p, g, *moments in _blocks(parameter, gradient, *state):
            wide, g = widened(p), widened(g)
            self._update_block(wide, g if scale == 1.0 else g * g.dtype.type(scale), moments, step, rate, decay)
            if wide is not p:
                store(wide, p)

    def _update_block(self, p: np.ndarray, g: np.ndarray, moments: list[np.ndarray], step: int, rate: float,
                      decay: float) -> None:
        raise TypeError(f"{type(self).__name__} does not define its update")


class SGD(Optimizer):
    """Stochastic gradient descent, with momentum as PyTorch defines it (Sutskever et al. 2013 for Nesterov's).

        g ← g + λ p;   b ← μ b + g  (b = g in the first step);   p ← p - η (g + μ b if nesterov else b)
    """

    elementwise = True

    def __init__(self, lr: LearningRate, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0,
                 decay_all: bool = False) -> None:
        super().__init__(lr, weight_decay, decay_all)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum!r}: expected a number in [0, 1)")
        if nesterov and not momentum:
            raise ValueError("nesterov=True needs a momentum above 0")
        self.momentum = momentum
        self.nesterov = nesterov
        self.state_names = ("momentum_buffer",) if momentum else ()

    def _update_block(self, p: np.ndarray, g: np.ndarray, moments: list[np.ndarray], step: int, rate: float,
                      decay: float) -> None:
        if decay:
            g = g + decay * p
        if moments:
            (buffer,) = moments
            buffer *= self.momentum
            buffer += g
            g = g + self.momentum * buffer if self.nesterov else buffer
        p -= rate * g


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2).

        m ← β₁ m + (1 - β₁) g;   v ← β₂ v + (1 - β₂) g²
        p ← p - η λ p - η (m / (1 - β₁ᵗ)) / (√(v / (1 - β₂ᵗ)) + ε)
    """

    elementwise = True
    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, lr: LearningRate = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.01, decay_all: bool = False) -> None:
        super().__init__(lr, weight_decay, decay_all)
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas!r}: expected two numbers in [0, 1)")
        if not 0 < eps < math.inf:
            raise ValueError(f"eps={eps!r}: expected a number above 0")
        self.betas = betas
        self.eps = eps

    def _update_block(self, p: np.ndarray, g: np.ndarray, moments: list[np.ndarray], step: int, rate: float,
                      decay: float) -> None:
        m, v = moments
        beta1, beta2 = self.betas
        scratch = g * (1 - beta1)
        m *= beta1
        m += scratch
        np.multiply(g, g, out=scratch)
        scratch *= 1 - beta2
        v *= beta2
        v += scratch
        np.multiply(v, 1 / (1 - beta2**step), out=scratch)
        np.sqrt(scratch, out=scratch)
        scratch += self.eps
        np.divide(m, scratch, out=scratch)
        scratch *= rate / (1 - beta1**step)
        if decay:
            p *= 1 - rate * decay
        p -= scratch


def _blocks(*arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Flat views of the same elements of each array, ``_BLOCK`` at a time."""
    flat = [array.reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, _BLOCK):
        yield tuple(array[start:start + _BLOCK] for array in flat)
