"""The memory ledger over time: live bytes by category from one moment to another, as text and as SVG.

    timeline = Timeline(device)          begins to listen
    trainer.step(ids, labels)
    timeline.stop()
    print(timeline.text())

It is a listener of allocations like any other: what it draws is what was really handed out and came back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from html import escape

from refdist.device.device import CATEGORIES, Device
from refdist.device.events import Allocation, Event

__all__ = ["SYMBOLS", "Timeline", "readable"]

SYMBOLS = {"parameter": "P", "gradient": "g", "master": "M", "optimizer": "o", "activation": "a", "gathered": "G",
           "communication": "c"}
_COLOURS = {"parameter": "#4477aa", "gradient": "#ee6677", "master": "#225555", "optimizer": "#aa3377", "activation": "#228833",
            "gathered": "#66ccee", "communication": "#ccbb44"}


class Timeline:
    """Live bytes of one device by category, change by change.

    Attributes:
        points: (seconds, bytes by category in the order of ``CATEGORIES``), the first when it was made.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._live = [device.live[category] for category in CATEGORIES]
        self.points: list[tuple[float, tuple[int, ...]]] = [(time.perf_counter(), tuple(self._live))]
        device.listeners.append(self)

    def __call__(self, event: Event) -> None:
        """Note an allocation, or memory that has come back."""
        if isinstance(event, Allocation):
            self._live[CATEGORIES.index(event.category)] += event.nbytes
            self.points.append((event.time, tuple(self._live)))

    def stop(self) -> None:
        """Listen no longer."""
        self.device.listeners.remove(self)
        self.points.append((time.perf_counter(), tuple(self._live)))

    @property
    def peak(self) -> int:
        """The most bytes alive at once."""
        return max(sum(live) for _, live in self.points)

    def columns(self, count: int) -> list[tuple[int, ...]]:
        """For each of ``count`` equal stretches of time, the bytes by category at the moment in it when most are alive."""
        start, end = self.points[0][0], self.points[-1][0]
        width = (end - start) / count or 1.0
        found: list[tuple[int, ...]] = []
        place, live = 0, self.points[0][1]
        for column in range(count):
            highest = live
            limit = start + (column + 1) * width
            while place < len(self.points) and (self.points[place][0] <= limit or column == count - 1):
                live = self.points[place][1]
                highest = max(highest, live, key=sum)
                place += 1
            found.append(highest)
        return found

    def text(self, width: int = 72, height: int = 14) -> str:
        """A picture of characters, the categories stacked in the order of ``CATEGORIES``."""
        columns = self.columns(width)
        peak = self.peak or 1
        stacks = [_stack(live, peak, height) for live in columns]
        lines = []
        for row in reversed(range(height)):
            label = f"{readable(peak * (row + 1) // height):>10} ┤" if (row + 1) % 4 == 0 or row == height - 1 else f"{'':>10} │"
            lines.append((label + "".join(stack[row] for stack in stacks)).rstrip())
        seconds = self.points[-1][0] - self.points[0][0]
        lines.append(f"{'':>10} └{'─' * width}  {seconds * 1e3:.1f} ms")
        used = [i for i in range(len(CATEGORIES)) if any(live[i] for live in columns)]
        lines.append(f"{'':>12}" + "  ".join(f"{SYMBOLS[CATEGORIES[i]]} {CATEGORIES[i]}" for i in used))
        return "\n".join(lines)

    def svg(self, title: str, width: int = 760, height: int = 300) -> str:
        """The same as areas, one path a category."""
        start, end = self.points[0][0], self.points[-1][0]
        peak, span = self.peak or 1, end - start or 1.0
        left, top, bottom = 80, 44, 56
        plot_width, plot_height = width - left - 20, height - top - bottom

        def x(moment: float) -> float:
            return left + plot_width * (moment - start) / span

        def y(nbytes: int) -> float:
            return top + plot_height * (1 - nbytes / peak)

        parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
                 'font-family="sans-serif" font-size="12">',
                 f'<rect width="{width}" height="{height}" fill="white"/>',
                 f'<text x="{left}" y="24" font-size="15">{escape(title)}</text>']
        base = [0] * len(self.points)
        legend = left
        for i, category in enumerate(CATEGORIES):
            upper = [below + live[i] for below, (_, live) in zip(base, self.points, strict=True)]
            if any(live[i] for _, live in self.points):
                moments = [moment for moment, _ in self.points]
                edge = _steps(moments, upper, x, y) + _steps(moments, base, x, y)[::-1]
                parts.append(f'<polygon fill="{_COLOURS[category]}" points="{" ".join(edge)}"/>')
                parts.append(f'<rect x="{legend}" y="{height - 22}" width="11" height="11" fill="{_COLOURS[category]}"/>')
                parts.append(f'<text x="{legend + 16}" y="{height - 12}">{category}</text>')
                legend += 34 + 7 * len(category)
            base = upper
        for part in range(5):
            level = y(peak * part // 4)
            parts.append(f'<line x1="{left}" x2="{left + plot_width}" y1="{level:.1f}" y2="{level:.1f}" stroke="#0002"/>')
            parts.append(f'<text x="{left - 8}" y="{level + 4:.1f}" text-anchor="end">{readable(peak * part // 4)}</text>')
        parts.append(f'<text x="{left + plot_width}" y="{height - bottom + 18}" text-anchor="end">{span * 1e3:.1f} ms</text>')
        return "\n".join([*parts, "</svg>", ""])


def _stack(live: tuple[int, ...], peak: int, height: int) -> str:
    """One column from the bottom: each category's symbol as many times as it has rows."""
    drawn, total = "", 0
    for category, nbytes in zip(CATEGORIES, live, strict=True):
        total += nbytes
        drawn += SYMBOLS[category] * (round(total * height / peak) - len(drawn))
    return drawn.ljust(height)


def _steps(moments: list[float], levels: list[int], x: Callable[[float], float], y: Callable[[int], float]) -> list[str]:
    """The corners of a line that stays level between changes."""
    corners = []
    for place, (moment, level) in enumerate(zip(moments, levels, strict=True)):
        if place:
            corners.append(f"{x(moment):.1f},{y(levels[place - 1]):.1f}")
        corners.append(f"{x(moment):.1f},{y(level):.1f}")
    return corners


def readable(nbytes: int) -> str:
    """Bytes with a unit: ``1.5 MiB``."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
