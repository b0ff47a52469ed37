"""Draw the charts of docs/pipeline.md.

    python examples/draw_schedules.py docs/pictures
"""

import sys
from fractions import Fraction
from pathlib import Path

from refdist.parallel.pipeline import SCHEDULES, Times, bubble, make_schedule, makespan, peak_in_flight, promise, simulate
from refdist.parallel.pipeline.draw import svg_chart
from refdist.parallel.pipeline.timing import idle

ONE = Fraction(1)
SIZES = {name: (4, 8, 2 if name == "interleaved" else 1) for name in SCHEDULES}  # stages, micro-batches, chunks


def chart(name: str) -> str:
    """The SVG chart of a schedule for F = B = W."""
    stages, micro_batches, chunks = SIZES[name]
    schedule = make_schedule(name, stages, micro_batches, chunks)
    times = Times(ONE, ONE, ONE, 3 * ONE if name.startswith("dualpipe") else None)
    spans, promised = simulate(schedule, times), promise(schedule, times)
    in_flight = [Fraction(peak, schedule.visits) for peak in peak_in_flight(schedule)]
    notes = [f"in flight {float(peak):g}, idle {float(wait):g}" for peak, wait in zip(in_flight, idle(spans), strict=True)]
    facts = [f"bubble {float(bubble(spans)):g} of {float(makespan(spans)):g}: {promised.bubble_formula}",
             f"in flight at most {float(max(in_flight)):g}: {promised.peak_formula}"]
    return svg_chart(spans, f"{SCHEDULES[name].title}: {stages} stages, {micro_batches} micro-batches", facts, notes)


def draw(folder: Path) -> None:
    """Write one SVG file for each schedule."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in SCHEDULES:
        (folder / f"pipeline-{name}.svg").write_text(chart(name), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/draw_schedules.py FOLDER")
    draw(Path(sys.argv[1]))
    print(f"{len(SCHEDULES)} charts")
