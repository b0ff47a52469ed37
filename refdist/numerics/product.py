"""Matrix products in the arithmetic of a graphics processor: low-precision inputs, a wider accumulator.

    y = c + round(a) round(b)

    tensor_core=None   the operands are rounded to the input format; BLAS multiplies and adds in FP32 (its order)
    tensor_core="h100" the arithmetic of that chip's tensor cores, bit for bit (see `tensor_core` and `chips`)

An element of the emulated result depends on its row of a, its column of b and its c, and on nothing else: cutting M or N
between ranks does not change a bit. BLAS promises no such thing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .aligned import aligned_empty
from .chips import ACCUMULATORS, INPUTS, Step, step_of
from .formats import FORMATS, Format, format_of
from .rounding import TileRounder, _round_nearest, convert, round_to, store, to_float32, widened
from .tensor_core import NAN_FP32, Operands
from .tensor_core_fast import chain

__all__ = ["FormatProduct", "Product", "matmul", "matmul_for"]

CHUNK = 16  # products between two roundings of an FP16 accumulator without a tensor core
MMA_SYNC_K = 32  # the K of mma.sync with fp8
ROWS = 1024  # of 16 bits that are widened at a time, so that they come from the cache when BLAS reads them


def matmul(
    a: Any,
    b: Any,
    c: Any = None,
    inputs: str = "fp16",
    accumulate: str = "fp32",
    tensor_core: str | None = None,
    *,
    promote_every: int | None = None,
    instruction: str | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """y = c + a b with inputs of one format and an accumulator of another.

    Args:
        a: [..., M, K], floating point of any format of `formats`, or float64; rounded to `inputs` to nearest even.
            tf32 on a chip drops the low 13 bits of float32 instead, as the hardware does.
        b: [..., K, N]; leading dimensions broadcast.
        c: [..., M, N] or what broadcasts to it; None: zero. Rounded to the accumulator's format.
        inputs: "fp16", "bf16", "tf32", "e4m3", "e5m2" or "fp32".
        accumulate: "fp32" or "fp16". With "fp16" and no tensor core the FP16 accumulator is rounded, to nearest even,
            after c and after every 16 products, which are summed in FP32.
        tensor_core: None, "v100", "t4", "a100", "ada", "h100", "h200" or "b200".
        promote_every: with a tensor core and accumulate="fp32": partial sums of so many products (a multiple of the
            chip's step) start from zero in the tensor core and are added in FP32, to nearest even, to a sum that
            starts with c. DeepSeek-V3 (2024, section 3.3.2) does this every 128 products of fp8.
        instruction: None, or "mma.sync": the older instruction, which adds fp8 differently on h100, h200 and b200.
        out: [..., M, N], float16, bfloat16, float32 or float64; the result is rounded to its dtype.

    Returns:
        y: [..., M, N], float32; float16 with accumulate="fp16"; or out.

    Raises:
        ValueError: an unknown format or chip, shapes that do not multiply, operands that are not floating point, or
            what the chip cannot do. The message says what is allowed.
    """
    step = _check_arithmetic(inputs, accumulate, tensor_core, promote_every, instruction)
    a, b, c = _operand("a", a), _operand("b", b), None if c is None else _operand("c", c)
    shape = _result_shape(a.shape, b.shape, None if c is None else c.shape)
    _check_out(out, shape)
    source = FORMATS[inputs]
    with np.errstate(over="ignore", invalid="ignore"):
        a, b = _inputs(a, source, step is not None), _inputs(b, source, step is not None)
    c = None if c is None else round_to(c, accumulate)
    apart = out is not None and not (np.may_share_memory(out, a) or np.may_share_memory(out, b))
    y = out if out is not None and out.dtype == np.float32 and apart else aligned_empty(shape, np.float32)
    _multiply(a, b, c, source, step, accumulate, promote_every, y)
    if out is None:
        return convert(y, "fp16") if accumulate == "fp16" else y
    return out if out is y else store(y, out)


def _multiply(
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray | None,
    inputs: Format,
    step: Step | None,
    accumulate: str,
    promote_every: int | None,
    y: np.ndarray,
) -> None:
    """y = c + a b, all float32 that holds numbers of the formats."""
    if step is not None:
        _emulate(a, b, c, inputs, step, accumulate == "fp16", promote_every, y)
    elif accumulate == "fp16":
        _chunked_fp16(a, b, c, y)
    else:
        np.matmul(a, b, out=y)
        if c is not None:
            y += c


class Product:
    """A function matmul(a, b, out=None) of one arithmetic, to stand in for np.matmul.

    Calling it rounds both operands to the input format. The result has the dtype that np.matmul would give it: the
    accumulator is rounded, to nearest even, to the dtype of the operands, as a GPU's GEMM stores it. A kernel that uses an
    operand several times, or makes one in FP32, takes the two steps of a call apart: `exact(round(a), round(b))`.

    Args:
        inputs, accumulate, tensor_core, promote_every, instruction: see `matmul`; checked at once.
    """

    def __init__(
        self,
        inputs: str = "fp16",
        accumulate: str = "fp32",
        tensor_core: str | None = None,
        *,
        promote_every: int | None = None,
        instruction: str | None = None,
    ) -> None:
        self.step = _check_arithmetic(inputs, accumulate, tensor_core, promote_every, instruction)
        self.inputs, self.accumulate, self.tensor_core = inputs, accumulate, tensor_core
        self.promote_every = promote_every
        self._rounder = TileRounder(FORMATS[inputs]) if inputs in ("fp16", "bf16") else None

    def __call__(self, a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """y [..., M, N] from a [..., M, K] and b [..., K, N], rounded to the input format first."""
        a, b = _operand("a", a), _operand("b", b)
        shape = _result_shape(a.shape, b.shape, None)
        if out is None:
            out = np.empty(shape, np.result_type(a, b))
        _check_out(out, shape)
        if self._rounder is not None and self.step is None and self.accumulate == "fp32" and out.ndim == 2:
            return self._by_blocks(a, b, out)
        y = out if out.dtype == np.float32 else aligned_empty(shape, np.float32)
        self.exact(self.round(a), self.round(b), out=y)
        return out if out is y else store(y, out)

    def _by_blocks(self, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> np.ndarray:
        """y [M, N] by rows of a, or, where its columns lie in memory one after the other, as a sum over parts of K."""
        if a.flags.c_contiguous:
            b = self.round(b)
            for start in range(0, len(a), ROWS):
                part = out[start : start + ROWS]
                y = np.matmul(self.round(a[start : start + ROWS]), b, out=part if part.dtype == np.float32 else None)
                if y is not part:
                    store(y, part)
            return out
        total = np.matmul(self.round(a[:, :ROWS]), self.round(b[:ROWS]))
        for start in range(ROWS, len(b), ROWS):
            total += np.matmul(self.round(a[:, start : start + ROWS]), self.round(b[start : start + ROWS]))
        return store(total, out)

    def round(self, x: np.ndarray) -> np.ndarray:
        """x [...] as a product reads it: float32 that holds numbers of the input format; x itself if nothing is to be done."""
        if self._rounder is not None and x.dtype == np.float32 and x.flags.c_contiguous:
            return self._rounder(x)
        with np.errstate(over="ignore", invalid="ignore"):
            return _inputs(x, FORMATS[self.inputs], self.step is not None)

    def exact(self, a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """y, float32 [..., M, N], from operands that `round` has given, or parts and transposes of them."""
        if self.step is None and self.accumulate == "fp32":
            return np.matmul(a, b, out=out)
        if out is None:
            out = np.empty(_result_shape(a.shape, b.shape, None), np.float32)
        _multiply(a, b, None, FORMATS[self.inputs], self.step, self.accumulate, self.promote_every, out)
        return out


class FormatProduct(Product):
    """As `Product`, for operands that are stored in the input format; others multiply in FP32, away from the tensor cores.

    So it is on a GPU: two fp16 matrices meet in the tensor cores, and where one of them has become FP32 by an oversight, the
    other one is widened and the FP32 cores do the work.
    """

    def __call__(self, a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """y [..., M, N] in the format of the operands, or in the wider one of the two."""
        if a.dtype == b.dtype == FORMATS[self.inputs].dtype:
            return super().__call__(a, b, out)
        y = np.matmul(widened(a), widened(b), out=out if out is not None and out.dtype == np.float32 else None)
        return y if out is None or out is y else store(y, out)


def matmul_for(
    inputs: str = "fp16",
    accumulate: str = "fp32",
    tensor_core: str | None = None,
    *,
    promote_every: int | None = None,
    instruction: str | None = None,
) -> Product:
    """The `Product` of that arithmetic: a function matmul(a, b, out=None) to stand in for np.matmul."""
    return Product(inputs, accumulate, tensor_core, promote_every=promote_every, instruction=instruction)


def _check_arithmetic(
    inputs: str, accumulate: str, tensor_core: str | None, promote_every: int | None, instruction: str | None
) -> Step | None:
    """The chip's step, None for BLAS; ValueError for what there is not."""
    if inputs not in INPUTS:
        raise ValueError(f"unknown input format {inputs!r}; the formats are {', '.join(INPUTS)}")
    if accumulate not in ACCUMULATORS:
        raise ValueError(f"unknown accumulator format {accumulate!r}; the formats are {', '.join(ACCUMULATORS)}")
    if tensor_core is None and instruction is not None:
        raise ValueError(f"instruction={instruction!r} needs a tensor core")
    step = None if tensor_core is None else step_of(tensor_core, inputs, accumulate, instruction)
    if promote_every is not None:
        _check_promotion(promote_every, step, accumulate)
    return step


def _check_promotion(every: int, step: Step | None, accumulate: str) -> None:
    if step is None or accumulate != "fp32":
        raise ValueError("promote_every needs a tensor core and accumulate='fp32'")
    period = MMA_SYNC_K if step.separate_addend else step.terms
    if every < 1 or every % period:
        raise ValueError(f"promote_every={every} is not a multiple of the {period} products of one step")


def _operand(name: str, x: Any) -> np.ndarray:
    x = np.asarray(x)
    if x.dtype != np.float64 and format_of(x.dtype) is None:
        allowed = "float16, bfloat16, float8_e4m3fn, float8_e5m2, float32 or float64"
        raise ValueError(f"operand {name} has dtype {x.dtype}; matmul takes {allowed}")
    return x


def _result_shape(a: tuple[int, ...], b: tuple[int, ...], c: tuple[int, ...] | None) -> tuple[int, ...]:
    """The shape of y, or a ValueError."""
    if len(a) < 2 or len(b) < 2 or a[-1] != b[-2]:
        raise ValueError(f"a {a} and b {b} do not multiply: expected [..., M, K] and [..., K, N]")
    try:
        shape = (*np.broadcast_shapes(a[:-2], b[:-2]), a[-2], b[-1])
    except ValueError:
        raise ValueError(f"the leading dimensions of a {a} and b {b} do not broadcast") from None
    try:
        fits = c is None or np.broadcast_shapes(shape, c) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"c {c} does not broadcast to the result {shape}")
    return shape


def _check_out(out: np.ndarray | None, shape: tuple[int, ...]) -> None:
    if out is None:
        return
    if out.shape != shape:
        raise ValueError(f"out has the shape {out.shape}, the result {shape}")
    if out.dtype != np.float64 and format_of(out.dtype) is None:
        raise ValueError(f"out has dtype {out.dtype}; the result is stored as float16, bfloat16, float8, float32 or float64")


def _inputs(x: np.ndarray, to: Format, on_chip: bool) -> np.ndarray:
    """float32 that holds numbers of the input format, in the order in which x lies in memory."""
    turned = x.swapaxes(-1, -2)
    if turned.flags.c_contiguous and not x.flags.c_contiguous:
        return _inputs(turned, to, on_chip).swapaxes(-1, -2)
    own = format_of(x.dtype)
    result = x if own == FORMATS["fp32"] and to == own else aligned_empty(x.shape, np.float32)
    if on_chip and to.name == "tf32":
        round_to(x, "fp32", out=result)
        raw = result.view(np.int32)
        np.bitwise_and(raw, -(1 << 13), out=raw, where=~np.isnan(result))
    elif own is not None and to.contains(own):
        if result is not x:
            to_float32(x, out=result)
    elif x.dtype == np.float32:
        _round_nearest(x, to, result, signed_zeros=False)
    else:
        round_to(x, to, out=result)
    return result


def _chunked_fp16(a: np.ndarray, b: np.ndarray, c: np.ndarray | None, y: np.ndarray) -> None:
    """y = c, then for each CHUNK of k: y = fp16(y + a b), the product and the sum in FP32."""
    y[...] = 0 if c is None else c
    partial = aligned_empty(y.shape, np.float32)
    for k in range(0, a.shape[-1], CHUNK):
        np.matmul(a[..., k : k + CHUNK], b[..., k : k + CHUNK, :], out=partial)
        partial += y
        round_to(partial, "fp16", out=y)


def _emulate(
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray | None,
    inputs: Format,
    step: Step,
    to_fp16: bool,
    promote_every: int | None,
    y: np.ndarray,
) -> None:
    """Write c + a b, in the chip's arithmetic, to y."""
    if y.size == 0:
        return
    result = y if y.flags.c_contiguous else np.empty(y.shape, np.float32)
    start = np.broadcast_to(np.float32(0) if c is None else c, y.shape)
    size, columns = b.shape[-2:]
    if b.size == size * columns:  # one b for all: its leading dimensions are rows
        rows, b = y.size // max(1, columns), b.reshape(1, size, columns)
        if a.shape[:-2] != y.shape[:-2]:
            a = np.broadcast_to(a, (*y.shape[:-2], *a.shape[-2:]))
    else:
        rows = y.shape[-2]
        a = np.broadcast_to(a, (*y.shape[:-2], rows, size))
        b = np.broadcast_to(b, (*y.shape[:-2], size, columns)).reshape(-1, size, columns)
    stack = (len(b), rows, columns)
    operands = Operands(a.reshape(len(b), rows, size), b, start.reshape(stack), inputs)
    if promote_every is None and not step.separate_addend:
        chain(operands, step, to_fp16, result.reshape(stack))
    else:
        _promoted(operands, step, to_fp16, promote_every, result.reshape(stack))
    if result is not y:
        y[...] = result


def _promoted(operands: Operands, step: Step, to_fp16: bool, every: int | None, out: np.ndarray) -> None:
    """Chains over `every` products that start from zero, each added to out by an addition that rounds to nearest even."""
    a, b, c, inputs = operands
    out[...] = c
    partial = np.empty_like(out)
    zero = np.zeros_like(out)
    period = every or MMA_SYNC_K
    for k in range(0, max(1, a.shape[-1]), period):
        part = slice(k, k + period)
        nested = Operands(a[..., part], b[:, part], zero, inputs)
        if step.separate_addend and every is not None and every > MMA_SYNC_K:
            _promoted(nested, step, to_fp16, None, partial)
        else:
            chain(_mma_sync_order(nested) if step.separate_addend else nested, step, to_fp16, partial)
        with np.errstate(invalid="ignore", over="ignore"):
            out += partial
        if to_fp16:
            round_to(out, "fp16", out=out)
    out[np.isnan(out)] = NAN_FP32


def _mma_sync_order(operands: Operands) -> Operands:
    """The order of k in which mma.sync takes the 32 products of fp8: first those with k % 4 < 2, then the others."""
    a, b, c, inputs = operands
    missing = -a.shape[-1] % MMA_SYNC_K
    a = np.pad(a, ((0, 0), (0, 0), (0, missing)))
    b = np.pad(b, ((0, 0), (0, missing), (0, 0)))
    order = np.argsort(np.arange(MMA_SYNC_K) % 4 // 2, kind="stable")
    return Operands(a[..., order], b[:, order], c, inputs)
