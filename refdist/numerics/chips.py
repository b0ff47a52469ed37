"""What each NVIDIA architecture's tensor cores do in one step, as data.

A step adds Kb products and the addend c. Every term is cut, toward zero, at F bits below the largest exponent among
them; the sum is rounded toward zero to the fraction bits of the result (or to nearest even, to fp16). See `tensor_core`.

    chip         fp16, bf16: Kb, F      tf32      fp8 (e4m3, e5m2): Kb, F, fraction bits of an fp32 result
    v100          4, 23 (fp16)            –             –
    t4            8, 24 (fp16) [R]        –             –
    a100, A2      8, 24                 4, 24           –
    ada, L40S     8, 24                 4, 24        16, 13, 13
    h100, h200   16, 25                 8, 25        32, 13, 13   (wgmma);  16, 25, 23 by mma.sync
    b200         16, 25                 8, 25        32, 25, 23   (tcgen05) [R];  16, 25, 23 by mma.sync

The numbers were read from Fasi, Higham, Mikaitis & Pranesh 2021, "Numerical behavior of NVIDIA tensor cores" (PeerJ CS
7:e330), from the models and GPU captures of github.com/north-numerical-computing/MATLAB-tensor-core (BSD-2-Clause) and
from github.com/microsoft/MMA-Sim, and hold for the captures bit for bit, except where marked [R]: those were only read.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ACCUMULATORS", "CHIPS", "INPUTS", "Step", "step_of"]


@dataclass(frozen=True)
class Step:
    """One step of a chip's arithmetic."""

    terms: int  # Kb: products that are summed at once
    kept_bits: int  # F: bits kept below the largest exponent
    result_bits: int = 23  # fraction bits of an fp32 result
    separate_addend: bool = False  # mma.sync with fp8: chains of 32 start from 0, and c is added afterwards


FP16_ALONE = ("fp16",)
SIXTEEN_BITS = ("fp16", "bf16")
FP8 = ("e4m3", "e5m2")

CHIPS: dict[str, dict[str, Step]] = {
    "v100": dict.fromkeys(FP16_ALONE, Step(4, 23)),
    "t4": dict.fromkeys(FP16_ALONE, Step(8, 24)),
    "a100": {**dict.fromkeys(SIXTEEN_BITS, Step(8, 24)), "tf32": Step(4, 24)},
    "ada": {**dict.fromkeys(SIXTEEN_BITS, Step(8, 24)), "tf32": Step(4, 24), **dict.fromkeys(FP8, Step(16, 13, 13))},
    "h100": {**dict.fromkeys(SIXTEEN_BITS, Step(16, 25)), "tf32": Step(8, 25), **dict.fromkeys(FP8, Step(32, 13, 13))},
    "h200": {**dict.fromkeys(SIXTEEN_BITS, Step(16, 25)), "tf32": Step(8, 25), **dict.fromkeys(FP8, Step(32, 13, 13))},
    "b200": {**dict.fromkeys(SIXTEEN_BITS, Step(16, 25)), "tf32": Step(8, 25), **dict.fromkeys(FP8, Step(32, 25))},
}

MMA_SYNC = {  # fp8 by the older instruction
    "ada": Step(16, 13, 13),
    "h100": Step(16, 25, separate_addend=True),
    "h200": Step(16, 25, separate_addend=True),
    "b200": Step(16, 25, separate_addend=True),
}

INPUTS = ("fp16", "bf16", "tf32", "e4m3", "e5m2", "fp32")
ACCUMULATORS = ("fp32", "fp16")


def step_of(chip: str, inputs: str, accumulate: str, instruction: str | None = None) -> Step:
    """The step of a chip for an input and an accumulator format.

    Args:
        chip: a key of CHIPS.
        inputs: "fp16", "bf16", "tf32", "e4m3" or "e5m2".
        accumulate: "fp32", or "fp16" where the inputs are fp16 or fp8.
        instruction: None: the chip's newest; "mma.sync": the older one, which differs for fp8 on h100, h200 and b200.

    Raises:
        ValueError: an unknown chip or instruction, or what the chip cannot do; the message says what it can.
    """
    if chip not in CHIPS:
        raise ValueError(f"unknown tensor core {chip!r}; the chips are {', '.join(CHIPS)}, or None for BLAS")
    steps = CHIPS[chip]
    if inputs == "fp32":
        raise ValueError(f"no tensor core takes fp32 inputs; {chip} takes {', '.join(steps)}; tensor_core=None takes fp32")
    if inputs not in steps:
        raise ValueError(f"the tensor cores of {chip} do not take {inputs}; they take {', '.join(steps)}")
    if accumulate == "fp16" and inputs in ("bf16", "tf32"):
        raise ValueError(f"tensor cores add {inputs} products in fp32 only, not in fp16")
    if instruction is None or (instruction == "mma.sync" and inputs not in FP8):
        return steps[inputs]
    if instruction != "mma.sync":
        raise ValueError(f"unknown instruction {instruction!r}; expected None or 'mma.sync'")
    return MMA_SYNC[chip]
