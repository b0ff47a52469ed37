"""Time conversions between number formats, and matrix products in the arithmetic of tensor cores.

    refdist bench numerics
    refdist bench numerics --sizes 256,1024 --tensor-cores none,h100 --inputs fp16,bf16 --json

Conversions are of a million numbers, ordinary ones and such as are subnormal in the format, in nanoseconds a number, next to
NumPy's own cast of the same numbers (`astype`). Products are of square matrices, in GFLOP/s, next to sgemm of the same size, on
one BLAS thread. A time is the best of several turns, in which what is compared takes turns.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import threadpoolctl
from rich.table import Table

import refdist as rd
from refdist.cli.display import make_console
from refdist.cli.options import above_0
from refdist.numerics import CHIPS, FORMATS, convert, to_float32
from refdist.numerics.chips import INPUTS

NUMBERS = 1 << 20
STORED = ("fp16", "bf16", "e4m3", "e5m2")  # formats with a dtype of their own
NO_CHIP = "none"  # products of rounded operands by BLAS


@dataclass
class Job:
    """What is timed."""

    sizes: list[int]
    tensor_cores: list[str]
    inputs: list[str]
    seconds: float
    json: bool
    plan: None = None
    topic: str = "numerics"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `refdist bench numerics`."""
    parser.add_argument("--sizes", default="256,512", metavar="N,…", help="of the matrices (default 256,512)")
    parser.add_argument("--tensor-cores", default="none,h100", metavar="NAME,…",
                        help=f"of none, {', '.join(CHIPS)}; or all (default none,h100)")
    parser.add_argument("--inputs", default="fp16", metavar="NAME,…", help=f"of {', '.join(INPUTS)}; or all (default fp16)")
    parser.add_argument("--seconds", type=above_0, default=0.5, metavar="T", help="for each line (default 0.5)")
    parser.add_argument("--json", action="store_true", help="one object a line")


def prepare(args: argparse.Namespace) -> Job:
    """Check what was asked for."""
    if not re.fullmatch(r"0*[1-9]\d{0,4}(,0*[1-9]\d{0,4})*", args.sizes):
        raise rd.ConfigError(f"--sizes {args.sizes}: expected numbers from 1 to 99999 with commas, as in 256,512")
    return Job([int(word) for word in args.sizes.split(",")], _some("--tensor-cores", args.tensor_cores, (NO_CHIP, *CHIPS)),
               _some("--inputs", args.inputs, INPUTS), args.seconds, args.json)


def _some(option: str, text: str, known: tuple[str, ...]) -> list[str]:
    names = list(known) if text == "all" else text.split(",")
    for name in names:
        if name not in known:
            raise rd.ConfigError(f"{option} {text}: {name!r} is none of {', '.join(known)}")
    return names


def program(comm: Any, job: Job) -> int:
    """Measure and print."""
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        conversions = [record for name in STORED for record in _conversions(name, job.seconds)]
        products = [_product(size, chip, name, job.seconds) for size in job.sizes for chip in job.tensor_cores
                    for name in job.inputs if chip == NO_CHIP or name in CHIPS[chip]]
    if job.json:
        print("\n".join(json.dumps(record) for record in (*conversions, *products)), flush=True)
    else:
        show(conversions, products)
    return 0


def _conversions(name: str, seconds: float) -> list[dict[str, Any]]:
    """To the format and back, of ordinary and of subnormal numbers."""
    to = FORMATS[name]
    ordinary = np.random.default_rng(0).standard_normal(NUMBERS).astype(np.float32)
    records = []
    for kind, wide in (("ordinary", ordinary), ("subnormal", (ordinary * 2.0**(to.min_exponent - 3)).astype(np.float32))):
        narrow, into, back = wide.astype(to.dtype), np.empty(NUMBERS, to.dtype), np.empty(NUMBERS, np.float32)
        pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            f"float32 to {name}": (lambda x=wide, out=into: convert(x, name, out=out),  # type: ignore[misc]
                                   lambda x=wide, dtype=to.dtype: x.astype(dtype)),  # type: ignore[misc]
            f"{name} to float32": (lambda x=narrow, out=back: to_float32(x, out=out),  # type: ignore[misc]
                                   lambda x=narrow: x.astype(np.float32))}  # type: ignore[misc]
        for what, calls in pairs.items():
            with np.errstate(over="ignore"):
                ours, numpys = (best / NUMBERS * 1e9 for best in _best(calls, seconds))
            records.append({"conversion": what, "numbers": kind, "ns": ours, "numpy_ns": numpys, "ratio": ours / numpys})
    return records


def _product(size: int, chip: str, name: str, seconds: float) -> dict[str, Any]:
    """y = a b, of matrices that hold numbers of the format in float32, and sgemm of the same."""
    a, b = (rd.numerics.round_to(x, name) for x in np.random.default_rng(size).standard_normal((2, size, size)))
    y, out = np.empty((size, size), np.float32), np.empty((size, size), np.float32)
    core = None if chip == NO_CHIP else chip
    ours, sgemm = _best((lambda: rd.numerics.matmul(a, b, inputs=name, tensor_core=core, out=y),
                         lambda: np.matmul(a, b, out=out)), seconds)
    gflop = 2 * size**3 / 1e9
    return {"product": size, "tensor_core": core, "inputs": name, "gflop_per_s": gflop / ours,
            "sgemm_gflop_per_s": gflop / sgemm, "times_sgemm": ours / sgemm}


def _best(calls: tuple[Callable[[], Any], ...], seconds: float) -> list[float]:
    """The best time of each of some calls, in turn, three times at least."""
    best, turns, end = [math.inf] * len(calls), 0, time.perf_counter() + seconds
    while turns < 3 or time.perf_counter() < end:
        for place, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[place] = min(best[place], time.perf_counter() - start)
        turns += 1
    return best


def show(conversions: list[dict[str, Any]], products: list[dict[str, Any]]) -> None:
    """The figures for a person."""
    console = make_console(soft_wrap=True)
    table = Table("conversion", "numbers", "ns each", "NumPy", "ratio", box=None, pad_edge=False)
    for record in conversions:
        table.add_row(record["conversion"], record["numbers"], f"{record['ns']:.2f}", f"{record['numpy_ns']:.2f}",
                      f"{record['ratio']:.2f}")
    _to_the_right(table, 2)
    console.print(table)
    table = Table("product", "inputs", "tensor core", "GFLOP/s", "sgemm", "time / sgemm", box=None, pad_edge=False)
    for record in products:
        table.add_row(f"{record['product']}³", record["inputs"], record["tensor_core"] or "none (BLAS)",
                      f"{record['gflop_per_s']:.2f}", f"{record['sgemm_gflop_per_s']:.1f}", f"{record['times_sgemm']:.2f}")
    _to_the_right(table, 3)
    console.print(table)


def _to_the_right(table: Table, first: int) -> None:
    for column in table.columns[first:]:
        column.justify = "right"
