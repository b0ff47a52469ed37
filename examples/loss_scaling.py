"""What loss scaling is for: fp16 without it learns nothing where gradients are small, and with it what fp32 learns.

    python examples/loss_scaling.py
    python examples/loss_scaling.py --steps 200 --plot loss_scaling.png

The loss is a mean over the tokens of a batch, so that the gradient of one token's loss is divided by their number: 16 million
in the training of Llama 3. This little run has 512 tokens a batch, and stands for one of 2^24 by scaling its loss by 512 / 2^24;
that is the scale "× 1" of the table. A logit's gradient is then at most 2^-24, the smallest number of fp16. Times a weight it is
zero, and no layer below the head hears of the loss. The task, to say the token before, needs the attention to learn.

Printed are the losses of three runs from the same weights on the same data, and the dynamic scale, in units of "× 1": it begins
at 2^16, doubles after 20 steps without an overflow (2000 in earnest), and halves after one with, whose step is skipped.
"""

import argparse

import numpy as np

import refdist as rd

ROWS, LENGTH, VOCABULARY = 32, 16, 16
UNIT = ROWS * LENGTH / 2.0**24  # a loss scale that makes a token's gradient that of one among 2^24
LR = 0.01

RUNS = {
    "fp32": ("fp32", lambda: None),
    "fp16, × 1": ("fp16", lambda: rd.numerics.LossScale(UNIT, growth_interval=None)),
    "fp16, dynamic": ("fp16", lambda: rd.numerics.LossScale(UNIT * 2**16, 20, smallest=UNIT, largest=UNIT * 2**40)),
}


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens; the label of each is the token before it."""
    tokens = np.random.default_rng(step).integers(0, VOCABULARY, (ROWS, LENGTH + 1))
    return tokens[:, 1:], tokens[:, :-1]


def train(name: str, steps: int, seed: int) -> list:
    """The result of each step."""
    precision, scale = RUNS[name]
    config = rd.ModelConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                            num_attention_heads=2, num_key_value_heads=2, initializer_range=0.1)
    params = rd.init_params(config, seed, dtype=np.float32)
    params["model.embed_tokens.weight"] *= 10  # tokens of size 1, which no gain of a norm has to enlarge

    def program(comm):
        trainer = rd.Trainer(config, rd.Plan(), comm, rd.AdamW(LR, weight_decay=0), precision, params=params, loss_scale=scale())
        return [trainer.step(*batch(step)) for step in range(steps)]

    return rd.run(program, ranks=1)[0]


def plot(results: dict[str, list], path: str) -> None:
    """Draw the losses, and below the dynamic scale."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install refdist[plot]") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (losses, scales) = pyplot.subplots(2, 1, figsize=(7, 6), sharex=True, height_ratios=(2, 1))
    for name, steps in results.items():
        style = {"linestyle": "--", "color": "black", "zorder": 3} if name == "fp32" else {}
        losses.plot([step.loss for step in steps], label=name, **style)
    losses.axhline(np.log(VOCABULARY), color="grey", linewidth=0.8, label="log 16: knows nothing")
    losses.set(ylabel="loss", title="the loss of a token among 2^24, in fp16")
    losses.legend()
    scales.semilogy([step.loss_scale / UNIT for step in results["fp16, dynamic"]], base=2, color="C2")
    for number, step in enumerate(results["fp16, dynamic"]):
        if step.skipped:
            scales.axvline(number, color="C3", linewidth=1)
    scales.set(xlabel="step", ylabel="dynamic loss scale\n(red: skipped)")
    figure.tight_layout()
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120, help="of each run (default 120)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", metavar="FILE", help="also draw the losses")
    options = parser.parse_args(arguments)
    results = {name: train(name, options.steps, options.seed) for name in RUNS}
    print(f"{'step':>6}" + "".join(f"{name:>16}" for name in RUNS) + f"{'dynamic scale':>16}{'skipped':>9}")
    for step in [*range(0, options.steps, max(1, options.steps // 12)), options.steps - 1]:
        losses = "".join(f"{result[step].loss:>16.3f}" for result in results.values())
        dynamic = results["fp16, dynamic"]
        skipped = sum(result.skipped for result in dynamic[: step + 1])
        print(f"{step + 1:>6}{losses}{f'2^{np.log2(dynamic[step].loss_scale / UNIT):.0f}':>16}{skipped:>9}")
    print(f"log {VOCABULARY} = {np.log(VOCABULARY):.3f} is the loss of who knows nothing")
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
