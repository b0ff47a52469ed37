"""Accelerators as data: peak FLOP/s by number format, memory, links. Every figure has a source or is missing.

    H100 SXM   132 of 144 SMs × 4 tensor cores × 512 multiply-adds × 2 FLOPs × 1.83 GHz = 989.4 TFLOP/s

Peaks are *dense*: a vendor's figure "with sparsity" (two of four weights are zero) is twice that and no training run reaches it.
``fp32`` is what FP32 multiply-adds give outside of matrix units; ``tf32``, ``bf16``, ``fp16``, ``fp8``, ``fp4`` are matrix units,
which add up in FP32. So a chain of headlines such as "5 → 5,000 TFLOP/s in twelve years" changes the format on its way: K40 in
FP32, B200 in FP8 dense (or 16 bits with sparsity). :func:`growth` says what a comparison compares.

Bytes and seconds are SI; a link's bandwidth is that of *one direction*, half of what vendors print.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from refdist.errors import ConfigError

__all__ = ["ACCELERATORS", "FORMATS", "Accelerator", "accelerator", "growth"]

FORMATS = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4")


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One accelerator.

    Attributes:
        name: for people.
        peak: number format -> FLOP/s, dense.
        memory: bytes.
        memory_bandwidth: bytes per second.
        link: bytes per second to its neighbours in the server, one direction; None: no source was found, or it has no such link.
        l2: bytes of second-level cache; None: no source was found.
        sparse: what the vendor multiplies matrix peaks by "with sparsity"; 1: it does not.
        year: of its announcement.
        sources: where the figures were read.
        missing: what no source was found for.

    Raises:
        ConfigError: a figure that is no positive number, or a number format that is not known.
    """

    name: str
    peak: Mapping[str, float]
    memory: int
    memory_bandwidth: float
    link: float | None = None
    l2: int | None = None
    sparse: int = 1
    year: int | None = None
    sources: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("sources", "missing"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not isinstance(self.peak, Mapping) or not self.peak:
            raise ConfigError(f"accelerator {self.name!r}: peak={self.peak!r}: expected FLOP/s by number format")
        for format_ in self.peak:
            if format_ not in FORMATS:
                raise ConfigError(f"accelerator {self.name!r}: number format {format_!r}: expected one of {', '.join(FORMATS)}")
        figures = {**{f"peak of {name}": value for name, value in self.peak.items()}, "memory": self.memory,
                   "memory_bandwidth": self.memory_bandwidth, "link": self.link, "l2": self.l2}
        for name, value in figures.items():
            if value is None and name in ("link", "l2"):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ConfigError(f"accelerator {self.name!r}: {name}={value!r}: expected a number above 0")

    def flops(self, format_: str = "bf16") -> float:
        """Dense peak FLOP/s in a number format."""
        if format_ not in self.peak:
            raise ConfigError(f"no peak of {format_} is known for {self.name}: expected one of {', '.join(self.peak)}")
        return self.peak[format_]

    def ridge(self, format_: str = "bf16") -> float:
        """FLOPs per byte of its memory above which the matrix units, not the memory, set the time (Williams et al. 2009)."""
        return self.flops(format_) / self.memory_bandwidth

    def scaled(self, compute: float = 1, network: float = 1) -> Accelerator:
        """One that computes and sends so many times as fast."""
        if compute == network == 1:
            return self
        return dataclasses.replace(self, name=f"{self.name} × {compute:g} compute × {network:g} network",
                                   peak={name: value * compute for name, value in self.peak.items()},
                                   link=None if self.link is None else self.link * network)


TERA, GIGA = 1e12, 1e9

_VOLTA = "NVIDIA 2017, Tesla V100 GPU architecture (white paper), table 1, as reprinted at xenon.com.au and maosong.website"
_HOPPER = ("NVIDIA H100 data sheet, as reprinted at archive-lib.hpctech.co.jp; unrounded peaks: "
           "glennklockwood.com/garden/processors/h100")
_BLACKWELL = "NVIDIA 2024, Blackwell architecture technical brief, HGX B200 at 1,000 W: glennklockwood.com/garden/processors/B200"
_AWS = "AWS Neuron documentation, Trainium2 architecture: awsdocs-neuron.readthedocs-hosted.com"
_TPU = "Google Cloud documentation, TPU v5p: docs.cloud.google.com/tpu/docs/v5p-training"

ACCELERATORS: dict[str, Accelerator] = {
    "k40": Accelerator(
        "NVIDIA Tesla K40", {"fp32": 5.04 * TERA}, 12 * 10**9, 288 * GIGA, None, 1536 * 1024, year=2013,
        sources=(_VOLTA + " (at its boost clock of 875 MHz; 4.29 TFLOP/s at the base clock of 745 MHz)",
                 "memory: microway.com, NVIDIA Tesla K40")),
    "v100": Accelerator(
        "NVIDIA V100 SXM2", {"fp32": 15.7 * TERA, "fp16": 125 * TERA}, 16 * 10**9, 900 * GIGA, 150 * GIGA, 6 * 2**20, year=2017,
        sources=(_VOLTA, "FP16: developer.nvidia.com/programming-tensor-cores-cuda-9-0",
                 "memory: olcf.ornl.gov, Summit user guide; NVLink, 300 GB/s both ways: datascienceassn.org")),
    "a100": Accelerator(
        "NVIDIA A100 SXM 80 GB", {"fp32": 19.5 * TERA, "tf32": 156 * TERA, "fp16": 312 * TERA, "bf16": 312 * TERA},
        80 * 10**9, 2039 * GIGA, 300 * GIGA, 40 * 2**20, sparse=2, year=2020,
        sources=("NVIDIA A100 data sheet: glennklockwood.com/garden/processors/A100",
                 "L2: device query at upb-pc2.atlassian.net, NVIDIA A100")),
    "h100": Accelerator(
        "NVIDIA H100 SXM",
        {"fp32": 66.9 * TERA, "tf32": 494.7 * TERA, "fp16": 989.4 * TERA, "bf16": 989.4 * TERA, "fp8": 1978.9 * TERA},
        80 * 10**9, 3350 * GIGA, 450 * GIGA, 50 * 2**20, sparse=2, year=2022, sources=(_HOPPER,)),
    "h200": Accelerator(
        "NVIDIA H200 SXM",
        {"fp32": 66.9 * TERA, "tf32": 494.7 * TERA, "fp16": 989.4 * TERA, "bf16": 989.4 * TERA, "fp8": 1978.9 * TERA},
        141 * 10**9, 4800 * GIGA, 450 * GIGA, sparse=2, year=2023, missing=("L2",),
        sources=("memory, NVLink, and that it computes as the H100: aiwiki.ai/wiki/nvidia_h200 (quotes NVIDIA)", _HOPPER)),
    "b200": Accelerator(
        "NVIDIA B200 (HGX)",
        {"fp32": 80 * TERA, "tf32": 1100 * TERA, "fp16": 2250 * TERA, "bf16": 2250 * TERA, "fp8": 4500 * TERA,
         "fp4": 9000 * TERA},
        180 * 10**9, 8000 * GIGA, 900 * GIGA, sparse=2, year=2024, missing=("L2",),
        sources=(_BLACKWELL, "memory: 192 GB on the chip, of which a server's show 179 to 180: docs.vultr.com, NVIDIA HGX B200")),
    "mi325x": Accelerator(
        "AMD Instinct MI325X",
        {"fp32": 163.4 * TERA, "tf32": 653.7 * TERA, "fp16": 1307.4 * TERA, "bf16": 1307.4 * TERA, "fp8": 2614.9 * TERA},
        256 * 10**9, 6000 * GIGA, None, sparse=2, year=2024, missing=("Infinity Fabric bandwidth from AMD", "L2"),
        sources=("awesomeagents.ai/hardware/amd-mi325x; 16 bits and memory also at docs.vultr.com, ROCm cookbook",)),
    "tpu-v5p": Accelerator(
        "Google TPU v5p", {"bf16": 459 * TERA}, 95 * 2**30, 2765 * GIGA, 600 * GIGA, year=2023,
        missing=("FP32 peak", "a cache as GPUs have one"), sources=(_TPU + " (1,200 GB/s both ways)",)),
    "trainium2": Accelerator(
        "AWS Trainium2",
        {"fp32": 181 * TERA, "tf32": 667 * TERA, "fp16": 667 * TERA, "bf16": 667 * TERA, "fp8": 1299 * TERA},
        96 * 2**30, 2900 * GIGA, 640 * GIGA, sparse=4, year=2024, missing=("a cache as GPUs have one",),
        sources=(_AWS + " (1.28 TB/s per chip, taken as both ways; with sparsity 2,563 TFLOP/s in every matrix format)",)),
}
"""By short names."""


def accelerator(text: str | Mapping[str, Any]) -> Accelerator:
    """By name, from a JSON file with an object of :class:`Accelerator`'s fields, or from such an object.

    Raises:
        ConfigError: no such name or file, or not such an object.
    """
    if isinstance(text, str) and text in ACCELERATORS:
        return ACCELERATORS[text]
    if isinstance(text, str):
        if not text.endswith(".json"):
            raise ConfigError(f"accelerator {text!r}: expected one of {', '.join(ACCELERATORS)}, or a .json file")
        text = read_object(text)
    return Accelerator(**checked_keys(text, Accelerator, "an accelerator"))


def growth(older: Accelerator, newer: Accelerator, older_format: str, newer_format: str, sparse: bool = False) -> dict[str, Any]:
    """How many times as fast the newer one is, and whether that compares like with like."""
    if sparse and newer_format in ("fp32", "fp64"):
        raise ConfigError(f"sparsity is of matrix units: not in {newer_format}")
    was, now = older.flops(older_format), newer.flops(newer_format) * (newer.sparse if sparse else 1)
    changed = [f"{older_format} → {newer_format}"] if older_format != newer_format else []
    return {"from": was, "to": now, "times": now / was, "changed": changed + (["dense → sparse"] if sparse else [])}


def read_object(path: str) -> Mapping[str, Any]:
    """The JSON object in a file."""
    try:
        read = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(read, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return read


def checked_keys(values: Mapping[str, Any], owner: type, what: str) -> dict[str, Any]:
    """The values, if they are fields of a dataclass and none that it needs is missing."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{what} is {values!r}: expected an object")
    fields = {field.name: field for field in dataclasses.fields(owner)}
    unknown = [name for name in values if name not in fields]
    missing = [name for name, field in fields.items() if name not in values and field.default is dataclasses.MISSING]
    if unknown or missing:
        fault = f"does not have {', '.join(unknown)}" if unknown else f"lacks {', '.join(missing)}"
        raise ConfigError(f"{what} {fault}: expected {', '.join(fields)}")
    return dict(values)
