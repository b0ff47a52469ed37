"""Dress rehearsal: one model trained under many plans; all loss curves must lie on the single device's.

    python examples/dress_rehearsal.py docs            200 steps under every plan: writes docs/rehearsal.md and its picture
    python examples/dress_rehearsal.py docs 20 dp4     fewer steps, and only the plans that are named

The model has six layers of 64, as the 16 ranks of `--preset llama3` want them; the text is Python's standard library. The single
device is `rd.reference` with AdamW as plain arithmetic on whole arrays (`refdist.testing.training`), no plan of one rank. In
float64 a curve may be 1e-9 away from it at any step; in float32, 16 times as far as the single device's float32 curve has been
from its float64 curve by then. Plans run on in-process ranks. The picture needs matplotlib.
"""

import sys
from pathlib import Path

import numpy as np

import refdist as rd
from refdist.cli.job import PLANS as PRESETS
from refdist.testing.training import AdamWFields, SingleDevice
from refdist.train.data import load_corpus, split_windows, training_windows

CONFIG = rd.ModelConfig(vocab_size=256, hidden_size=64, intermediate_size=176, num_hidden_layers=6, num_attention_heads=4,
                        num_key_value_heads=2)
BATCH, SEQ, STEPS, CLIP = 8, 64, 200, 1.0
ADAMW = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
FP64_BOUND, FP32_MULTIPLE = 1e-9, 16

PLANS = {
    "dp4": {"dp": 4},
    "fsdp4, ZeRO 1": {"fsdp": 4, "zero": 1},
    "fsdp4, ZeRO 2": {"fsdp": 4, "zero": 2},
    "fsdp4, ZeRO 3": {"fsdp": 4, "zero": 3},
    "tp2 · dp2": {"tp": 2, "dp": 2},
    "cp4, ring": {"cp": 4},
    "cp4, all-gather": {"cp": 4, "cp_method": "all_gather"},
    "cp4, Ulysses": {"cp": 4, "cp_method": "ulysses"},
    "pp4, GPipe": {"pp": 4, "micro_batches": 4, "schedule": "gpipe"},
    "pp4, 1F1B": {"pp": 4, "micro_batches": 4},
    "pp4, ZB-H1": {"pp": 4, "micro_batches": 4, "schedule": "zb_h1"},
    "tp2 · cp2 · pp2 · fsdp2 (Llama 3's shape)": PRESETS["llama3"],
}
DTYPES = {"fp64": np.float64, "fp32": np.float32}
Curve = list[float]

PAGE = """# Dress rehearsal

One model, {steps} steps of AdamW on the source of Python's standard library, under {plans} plans. All loss curves lie on the
single device's. This page and its picture are written by `python examples/dress_rehearsal.py docs`.

The model has {config.num_hidden_layers} layers of {config.hidden_size}, {parameters:,} parameters; a batch is {batch} sequences
of {seq} bytes. The single device is `rd.reference` with AdamW written out on whole arrays. It ends at a loss of {fp64:.6f} in
float64, and of {fp32:.6f} in float32.

| plan | ranks | last loss, float64 | farthest from the single device, float64 | float32 | in units of its own error |
|---|---|---|---|---|---|
{rows}

The bound in float64 is {bound:.0e} at every step. In float32 it is {multiple} times the single device's own error: how far its
float32 curve has been from its float64 curve by that step, at most {own:.1e} here. Rounding differs between plans because sums
are taken in another order, and such differences grow with the steps.

![loss curves of all plans, and their distance from the single device's](pictures/rehearsal.svg)
"""

def batch(text: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
    """The global batch of a step, counted from 1: the same for every plan."""
    return split_windows(training_windows(text, BATCH, SEQ, seed=0, step=step))


def single_device(text: np.ndarray, steps: int, precision: str) -> Curve:
    """The losses of one device."""
    params = {name: array.astype(DTYPES[precision]) for name, array in rd.init_params(CONFIG, seed=0).items()}
    device = SingleDevice(params, AdamWFields(**ADAMW), CLIP)
    for step in range(1, steps + 1):
        loss, grads = rd.reference.loss_and_grads(CONFIG, device.params, *batch(text, step))
        device.step(float(loss), grads)
    return [loss for loss, _ in device.history]


def under(plan: rd.Plan, text: np.ndarray, steps: int, precision: str) -> Curve:
    """The losses under a plan."""
    def program(comm: rd.Comm) -> Curve:
        trainer = rd.Trainer(CONFIG, plan, comm, rd.AdamW(**ADAMW), precision, seed=0, clip_norm=CLIP)
        return [trainer.step(*batch(text, step)).loss for step in range(1, steps + 1)]

    return rd.run(program, ranks=plan.world_size)[0]


def distances(curve: Curve, other: Curve) -> np.ndarray:
    """How far apart two curves are at each step."""
    return np.abs(np.array(curve) - np.array(other))


def page(single: dict[str, Curve], curves: dict[str, dict[str, Curve]]) -> tuple[str, bool]:
    """The page with the table, and whether every curve is within its bound."""
    steps = len(single["fp64"])
    own = np.maximum.accumulate(distances(single["fp32"], single["fp64"]))
    rows, good = [], True
    for name, curve in curves.items():
        fp64 = distances(curve["fp64"], single["fp64"]).max()
        fp32 = distances(curve["fp32"], single["fp32"])
        multiple = (fp32 / np.maximum(own, np.spacing(np.float32(single["fp32"][0])))).max()
        good &= bool(fp64 <= FP64_BOUND and multiple <= FP32_MULTIPLE)
        ranks = rd.Plan(**PLANS[name]).world_size
        rows.append(f"| {name} | {ranks} | {curve['fp64'][-1]:.6f} | {fp64:.1e} | {fp32.max():.1e} | {multiple:.1f} |")
    return PAGE.format(
        steps=steps, plans=len(curves), config=CONFIG, parameters=CONFIG.num_parameters(), batch=BATCH, seq=SEQ,
        rows="\n".join(rows), fp64=single["fp64"][-1], fp32=single["fp32"][-1], bound=FP64_BOUND, multiple=FP32_MULTIPLE,
        own=own.max()), good


def picture(path: Path, single: dict[str, Curve], curves: dict[str, dict[str, Curve]]) -> None:
    """Draw the loss curves, and how far each is from the single device's."""
    from matplotlib import colormaps, rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = "refdist"  # the same file in every run
    figure = Figure(figsize=(9, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    steps = np.arange(1, len(single["fp64"]) + 1)
    for place, (name, curve) in enumerate(curves.items()):
        color = colormaps["tab20"](place % 20)
        above.plot(steps, curve["fp64"], linewidth=1, color=color)
        for precision, style in (("fp64", "-"), ("fp32", ":")):
            apart = np.maximum(distances(curve[precision], single[precision]), 1e-17)
            below.plot(steps, apart, style, linewidth=1, color=color, label=name if precision == "fp64" else None)
    above.plot(steps, single["fp64"], "k--", linewidth=1.2, label="single device")
    above.set_ylabel("loss, nats per byte")
    above.set_title(f"{len(curves)} plans, one curve")
    above.legend()
    below.axhline(FP64_BOUND, color="gray", linewidth=0.8)
    below.text(steps[-1], FP64_BOUND * 1.4, "bound in float64", color="gray", fontsize=8, ha="right")
    below.set_yscale("log")
    below.set_ylabel("distance from the single device")
    below.set_xlabel("step (solid: float64, dotted: float32)")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, format="svg", metadata={"Date": None})


def main(folder: Path, steps: int = STEPS, *names: str) -> int:
    """Train under every plan (or those named), write page and picture; 1 if a curve is too far away."""
    text = load_corpus([], SEQ).train
    single = {precision: single_device(text, steps, precision) for precision in DTYPES}
    curves = {}
    for name in names or PLANS:
        plan = rd.Plan(**PLANS[name])
        curves[name] = {precision: under(plan, text, steps, precision) for precision in DTYPES}
        print(f"{name}: loss {curves[name]['fp64'][-1]:.6f}, farthest from the single device "
              f"{distances(curves[name]['fp64'], single['fp64']).max():.1e}", flush=True)
    words, good = page(single, curves)
    (folder / "rehearsal.md").write_text(words, encoding="utf-8")
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    try:
        picture(folder / "pictures" / "rehearsal.svg", single, curves)
    except ImportError:
        print("no picture: it needs matplotlib")
    print("every curve is within its bound" if good else "a curve is too far away")
    return 0 if good else 1


if __name__ == "__main__":
    unknown = [name for name in sys.argv[3:] if name not in PLANS]
    if len(sys.argv) < 2 or unknown or not all(words.isdigit() for words in sys.argv[2:3]):
        sys.exit(f"usage: python examples/dress_rehearsal.py FOLDER [STEPS [PLAN …]]; the plans are {'; '.join(PLANS)}")
    sys.exit(main(Path(sys.argv[1]), *map(int, sys.argv[2:3]), *sys.argv[3:]))
