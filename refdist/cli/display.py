"""What `refdist train` shows while it runs: a progress display on a terminal, lines elsewhere, JSON for machines.

All have the same methods: `begin(facts)`, `step(record)` after each step, and `end(summary)`; rank 0 alone shows anything.
A record has: step, loss, grad_norm, learning_rate, tokens, seconds, tokens_per_s, bytes_sent (by rank 0 in this step), and,
after an evaluation, validation_loss; with loss scaling also loss_scale, and whether the step was skipped. The summary's keys
are in `train.py`.
"""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from refdist.cli.launch import launched, read_note
from refdist.cli.options import counted

Record = dict[str, Any]
LINES = 20  # lines of progress where there is no terminal


def make_display(as_json: bool, steps: int, rank: int) -> Display:
    """The display that fits this rank and the user's terminal."""
    if rank != 0:
        return Display()
    if as_json:
        return Json()
    console = make_console()
    return Live(console, steps) if console.is_terminal else Lines(console, steps)


class Terminal(Console):
    """A console that does not end the process itself, with a status of its own, when its reader has gone."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        raise BrokenPipeError


def make_console(**options: Any) -> Console:
    """A console that knows the user's terminal, which a rank does not see: its output is a pipe to mpirun.

    Our own parent has left a note. Another launcher tells nothing, and Open MPI's gives each rank a terminal of its own.
    `options`: other arguments of rich's Console.
    """
    note = read_note(os.environ)
    if note is not None:
        return Terminal(force_terminal=note.terminal, highlight=False, **{"width": note.columns, **options})
    return Terminal(force_terminal=False if launched(os.environ) else None, highlight=False, **options)


class Display:
    """Shows nothing: what every rank but the first has."""

    def begin(self, facts: Record) -> None:
        """The run begins."""

    def step(self, record: Record) -> None:
        """A step has been done."""

    def end(self, summary: Record) -> None:
        """The run has ended."""

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the terminal as it was, whatever has happened."""


class Json(Display):
    """One JSON object a step on a line, and one for the summary at the end."""

    def step(self, record: Record) -> None:
        """Print a step's record."""
        self._print(record)

    def end(self, summary: Record) -> None:
        """Print the summary."""
        self._print(summary)

    def _print(self, values: Record) -> None:
        sys.stdout.write(as_json(values) + "\n")
        sys.stdout.flush()


class Lines(Display):
    """A line of progress now and then."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console = console
        self.steps = steps

    def begin(self, facts: Record) -> None:
        """Say what is trained on what."""
        self._print("Llama with {} of {hidden_size}, {parameters:,} parameters"
                    .format(counted(facts["layers"], "layer"), **facts))
        self._print("{origin}: {train_bytes:,} bytes to train on, {validation_bytes:,} to validate on".format(**facts))

    def step(self, record: Record) -> None:
        """Print a step's figures, at every twentieth part of the run and after an evaluation."""
        step = record["step"]
        if step == 1 or step % max(1, self.steps // LINES) == 0 or "validation_loss" in record:
            self._print(f"step {step:>{len(str(self.steps))}}/{self.steps}  {figures(record)}")

    def end(self, summary: Record) -> None:
        """Print how the model compares with the bigrams, and the sample."""
        better = summary["bigram_loss"] - summary["validation_loss"]
        if math.isfinite(better):
            self._print(
                "validation loss {validation_loss:.3f} nats per byte, bigram {bigram_loss:.3f}: ".format(**summary)
                + f"{abs(better):.3f} {'better' if better >= 0 else 'worse'} than the bigram"
            )
        steps, ranks = counted(summary["steps"], "step"), counted(summary["world_size"], "rank")
        self._print("{} in {seconds:.0f} s on {} ({transport})".format(steps, ranks, **summary))
        self._print(utilization(summary))
        if "sample" in summary:
            self._print("a sample, after {prompt!r}:\n{sample}".format(**summary))

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)


class Live(Lines):
    """A bar that fills, with the figures of the last step.

    Each picture ends with a newline, and the next one goes back over it: mpirun passes on whole lines only.
    """

    def __init__(self, console: Console, steps: int) -> None:
        super().__init__(console, steps)
        self.bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=20),
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(compact=True),
            console=console,
            auto_refresh=False,
        )
        self.drawn = 0  # lines of the picture on the terminal

    def begin(self, facts: Record) -> None:
        """Say what is trained on what, and draw the bar."""
        super().begin(facts)
        self.task = self.bar.add_task("", total=self.steps)
        self._draw()

    def step(self, record: Record) -> None:
        """Move the bar; a validation gets a line of its own above it."""
        if "validation_loss" in record:
            self._erase()
            self._print(f"step {record['step']}  validation {record['validation_loss']:.3f}")
        plain = {key: value for key, value in record.items() if key != "validation_loss"}
        self.bar.update(self.task, completed=record["step"], description=figures(plain))
        self._draw()

    def _draw(self) -> None:
        with self.console.capture() as captured:
            self.console.print(self.bar.get_renderable())
        picture = captured.get()
        self._erase()
        self.console.file.write(picture)
        self.console.file.flush()
        self.drawn = picture.count("\n")

    def _erase(self) -> None:
        if self.drawn:
            self.console.file.write(f"\x1b[{self.drawn}A\x1b[J")
            self.drawn = 0


def as_json(values: Record) -> str:
    """One line of JSON, which knows no infinity and no NaN: null stands for them."""
    lost = {key for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    return json.dumps({key: None if key in lost else value for key, value in values.items()})


def figures(record: Record) -> str:
    """The figures of a step, as in "loss 2.512  |g| 0.83  12,300 tokens/s  1.42 MB sent"."""
    text = "loss {loss:.3f}  |g| {grad_norm:.2f}  {tokens_per_s:,.0f} tokens/s".format(**record)
    text += f"  {record['bytes_sent'] / 1e6:.2f} MB sent"
    if "loss_scale" in record:
        text += f"  loss × {record['loss_scale']:,.0f}" + ("  overflow, skipped" if record["skipped"] else "")
    if "validation_loss" in record:
        text += f"  validation {record['validation_loss']:.3f}"
    return text


def utilization(summary: Record) -> str:
    """What was computed and which part of the peak that is, as in "42.1 TFLOP …; MFU 31.2 % and HFU 31.2 % of …"."""
    of = ("this machine's float32 product" if summary["peak"] == "sgemm" else
          "{world_size} × {peak}, 16 bit".format(**summary))
    return (f"{magnitude(summary['model_flops'])}FLOP of the model, {magnitude(summary['executed_flops'])}FLOP executed: "
            f"MFU {percent(summary['mfu'])}, HFU {percent(summary['hfu'])} of {of} "
            f"({magnitude(summary['peak_flops_per_s'])}FLOP/s)")


def magnitude(value: float) -> str:
    """A number with a prefix, as in "42.1 T"."""
    for power, prefix in ((15, "P"), (12, "T"), (9, "G")):
        if value >= 10**power:
            return f"{value / 10**power:.1f} {prefix}"
    return f"{value / 1e6:.1f} M"


def percent(part: float) -> str:
    """A part of one, as in "31.2 %", or "0.0012 %" where it is small."""
    return f"{100 * part:.1f} %" if part >= 0.01 else f"{100 * part:.2g} %"
