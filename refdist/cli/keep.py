"""What a training run leaves behind: the model, the figures of every step, a picture of the loss.

    DIR/config.json, DIR/model.safetensors     Hugging Face's files; `refdist sample DIR` and transformers read them
    DIR/metrics.jsonl                          one JSON object a step, then the summary
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

import refdist as rd
from refdist.aside import write_aside
from refdist.cli.display import Record, as_json

METRICS = "metrics.jsonl"


def check(save: Path | None, plot: Path | None, trace: Path | None = None) -> None:
    """Refuse, before any work is done, a place that cannot be written to and a picture that cannot be drawn."""
    if save is not None:
        if save.exists() and not save.is_dir():
            raise rd.ConfigError(f"--save {save}: expected a folder, this is a file")
        _check_writable("--save", save)
    if plot is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise rd.ConfigError("--plot needs matplotlib: `pip install 'refdist[plot]'` brings it")
        if plot.is_dir():
            raise rd.ConfigError(f"--plot {plot}: expected a file, this is a folder")
        if plot.suffix.lower() not in (".png", ".svg", ".pdf"):
            raise rd.ConfigError(f"--plot {plot}: expected a name that ends with .png, .svg or .pdf")
        _check_writable("--plot", plot.parent)
    if trace is not None:
        if trace.is_dir():
            raise rd.ConfigError(f"--trace {trace}: expected a file, this is a folder")
        _check_writable("--trace", trace.parent)


def _check_writable(option: str, folder: Path) -> None:
    """The folder, or the nearest one above it that exists, must be one that this user can really write to."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError:
        raise rd.ConfigError(f"{option}: {folder} cannot be written to") from None


def results(save: Path | None, plot: Path | None, config: rd.ModelConfig, params: Mapping[str, np.ndarray],
            records: Sequence[Record], trace: Path | None = None, events: str = "") -> str:
    """Write what was asked for; ``records`` are the steps and, last, the summary, ``events`` the contents of ``trace``.

    Returns what could not be written, or "".
    """
    option = ""
    try:
        if save is not None:
            option = f"--save {save}"
            rd.save_params(save, config, params)
            write_aside(save / METRICS, "".join(as_json(record) + "\n" for record in records))
        if plot is not None:
            option = f"--plot {plot}"
            plot.parent.mkdir(parents=True, exist_ok=True)
            write_aside(plot, picture(records, plot.suffix.lower()[1:]))
        if trace is not None:
            option = f"--trace {trace}"
            trace.parent.mkdir(parents=True, exist_ok=True)
            write_aside(trace, events)
    except OSError as error:
        return f"{option} could not be written: {error.strerror or error}"
    return ""


def picture(records: Sequence[Record], kind: str) -> bytes:
    """The loss of every step and the validation losses, with the bigram's as a line."""
    import io

    from matplotlib.figure import Figure

    *steps, summary = records
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([record["step"] for record in steps], [record["loss"] for record in steps], linewidth=1, label="training batch")
    validated = [record for record in steps if "validation_loss" in record]
    axes.plot([record["step"] for record in validated], [record["validation_loss"] for record in validated], "o-",
              label="validation")
    axes.axhline(summary["bigram_loss"], color="gray", linestyle="--", label="byte bigrams, validation")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per byte")
    axes.legend()
    contents = io.BytesIO()
    figure.savefig(contents, format=kind, dpi=150)
    return contents.getvalue()
