"""How the error of a dot product grows with its length: an FP16 accumulator against an FP32 one, truncation against rounding.

    python examples/fp16_accumulate.py
    python examples/fp16_accumulate.py --largest 16384 --plot error.png

Both operands are fp16 numbers between 0 and 1. With a growing total, ever more of each product falls below the accumulator's
last bit. Tensor cores with an FP32 accumulator cut it off there, so all their errors have one sign and add up: in proportion
to K. BLAS rounds, so its errors cancel. An FP16 accumulator has 13 bits less; it is rounded to nearest, and its error grows
like the square root of K. Printed are, for each length K, the root mean square of the relative error and, after the slash,
its mean, both in units of 2^-24, half the last bit of FP32.
"""

import argparse

import numpy as np

import refdist as rd

MODES = {
    "BLAS fp32": {"accumulate": "fp32", "tensor_core": None},
    "v100 fp32": {"accumulate": "fp32", "tensor_core": "v100"},
    "h100 fp32": {"accumulate": "fp32", "tensor_core": "h100"},
    "BLAS fp16": {"accumulate": "fp16", "tensor_core": None},
    "h100 fp16": {"accumulate": "fp16", "tensor_core": "h100"},
}
UNIT = 2.0**-24


def relative_errors(length: int, rows: int, seed: int) -> dict[str, np.ndarray]:
    """The relative errors of rows × rows dot products of that length, for each mode, in units of 2^-24."""
    rng = np.random.default_rng(seed)
    a, b = (rng.random(shape).astype(np.float16) for shape in ((rows, length), (length, rows)))
    exact = a.astype(np.float64) @ b.astype(np.float64)  # 22-bit products: exact to 2^-50 here
    return {name: (rd.numerics.matmul(a, b, **mode) - exact) / exact / UNIT for name, mode in MODES.items()}


def plot(lengths: list[int], errors: list[dict[str, np.ndarray]], path: str) -> None:
    """Draw the root mean square errors over K."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install refdist[plot]") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name in MODES:
        style = {"linestyle": "--", "marker": "x", "zorder": 3} if name.startswith("BLAS") else {"marker": "o"}
        axes.loglog(lengths, [np.sqrt(np.mean(e[name] ** 2)) * UNIT for e in errors], label=name, **style)
    axes.set(xlabel="K", ylabel="root mean square relative error", title="c + a b with fp16 inputs")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--largest", type=int, default=8192, help="the largest K (default 8192)")
    parser.add_argument("--rows", type=int, default=48, help="rows of a and columns of b (default 48)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", metavar="FILE", help="also draw the table")
    options = parser.parse_args(arguments)
    lengths = [2**e for e in range(4, options.largest.bit_length())]
    print("relative errors in units of 2^-24: root mean square / mean\n")
    print(f"{'K':>6}" + "".join(f"{name:>22}" for name in MODES))
    errors = []
    for length in lengths:
        errors.append(relative_errors(length, options.rows, options.seed))
        cells = (f"{np.sqrt(np.mean(e**2)):.1f} /{np.mean(e):+.1f}" for e in errors[-1].values())
        print(f"{length:>6}" + "".join(f"{cell:>22}" for cell in cells), flush=True)
    if options.plot:
        plot(lengths, errors, options.plot)


if __name__ == "__main__":
    main()
