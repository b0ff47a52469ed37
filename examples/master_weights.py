"""What master weights are for: bf16 alone loses small updates to rounding; a copy of the weights in FP32 collects them.

    python examples/master_weights.py
    python examples/master_weights.py --steps 400 --lr 1e-4 --plot master_weights.png

bf16 has 8 significant bits: next to 0.7 the numbers are 2^-8 apart. AdamW changes a weight by about the learning rate, here
2 · 10^-4, a twentieth of that, and 0.7 + 0.0002 is 0.7 again, in this step and in every later one. Only weights near zero move.
The optimizer's moments are in FP32 in all three runs; what differs is what it updates.

Printed are the losses of three runs from the same weights on the same data, and how many of the weights have changed at the end.
"""

import argparse

import numpy as np

import refdist as rd

ROWS, LENGTH, VOCABULARY = 32, 16, 16

RUNS = {
    "fp32": ("fp32", rd.Plan()),
    "bf16 with masters": ("bf16", rd.Plan()),
    "bf16 without": ("bf16", rd.Plan(master_weights=False)),
}


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens; each has one label, always the same."""
    tokens = np.random.default_rng(step).integers(0, VOCABULARY, (ROWS, LENGTH))
    return tokens, np.random.default_rng(7).permutation(VOCABULARY)[tokens]


def train(name: str, steps: int, lr: float, seed: int) -> tuple[list[float], float]:
    """The loss of each step, and which part of the weights differs from the initial ones at the end."""
    precision, plan = RUNS[name]
    config = rd.ModelConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                            num_attention_heads=2, num_key_value_heads=2, initializer_range=0.7)

    def program(comm):
        trainer = rd.Trainer(config, plan, comm, rd.AdamW(lr, weight_decay=0), precision, seed=seed)
        before = trainer.full_params()
        losses = [trainer.step(*batch(step)).loss for step in range(steps)]
        changed = [after != before[name] for name, after in trainer.full_params().items()]
        return losses, sum(map(np.count_nonzero, changed)) / sum(part.size for part in changed)

    return rd.run(program, ranks=1)[0]


def plot(results: dict[str, tuple[list[float], float]], path: str) -> None:
    """Draw the losses."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install refdist[plot]") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name, (losses, changed) in results.items():
        style = {"linestyle": "--", "color": "black", "zorder": 3} if name == "fp32" else {}
        axes.plot(losses, label=f"{name}: {changed:.0%} of the weights have changed", **style)
    axes.set(xlabel="step", ylabel="loss", title="updates that are small beside the weights")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=240, help="of each run (default 240)")
    parser.add_argument("--lr", type=float, default=2e-4, help="learning rate of AdamW (default 0.0002)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", metavar="FILE", help="also draw the losses")
    options = parser.parse_args(arguments)
    results = {name: train(name, options.steps, options.lr, options.seed) for name in RUNS}
    print(f"{'step':>8}" + "".join(f"{name:>20}" for name in RUNS))
    for step in [*range(0, options.steps, max(1, options.steps // 12)), options.steps - 1]:
        print(f"{step + 1:>8}" + "".join(f"{losses[step]:>20.3f}" for losses, _ in results.values()))
    print(f"{'changed':>8}" + "".join(f"{changed:>20.1%}" for _, changed in results.values()))
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
