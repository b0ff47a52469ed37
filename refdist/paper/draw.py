"""Pictures of what is on paper, as SVG: a cluster's levels one in another, and bars of parts of a whole.

    ┌ cluster ────────────────────────────┐        parameter ▇▇▇▇▇▇▇▇
    │ ┌ pod ───────────────┐ ┌──┐         │        gradient  ▇▇▇▇
    │ │ ▫▫▫▫▫▫▫▫  …        │ │  │ … × 8   │        …
    │ └────────────────────┘ └──┘         │
    └─────────────────────────────────────┘
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence

from refdist.paper.cluster import Cluster
from refdist.parallel.pipeline.draw import text_at

__all__ = ["bandwidth", "bars_svg", "cluster_svg", "cluster_text", "gigabytes", "seconds"]

_INK, _MUTED = "#1c2733", "#5d6b7a"
_FILLS = ("#ffffff", "#eceff3", "#dbe3ee", "#c5d3e6", "#aec3de")
COLOURS = ("#4477aa", "#ee6677", "#225555", "#aa3377", "#228833", "#66ccee", "#ccbb44", "#999999", "#dd8855", "#332288",
           "#117733", "#882255")


def gigabytes(nbytes: float) -> str:
    """Bytes in SI units, as vendors and papers give them: ``6.49 TB``."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(size) < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 100 else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} PB"


def bandwidth(value: float) -> str:
    """Bytes per second."""
    return f"{gigabytes(value)}/s"


def seconds(value: float) -> str:
    """A time in the unit that fits: ``1.25 ms``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size or unit == "µs":
            return f"{value / size:.3g} {unit}"
    return ""


def cluster_text(cluster: Cluster) -> str:
    """One line a level, from the outermost one, indented by how far inside it is."""
    accelerator = cluster.accelerator
    lines = []
    for depth, level in enumerate(reversed(range(len(cluster.levels)))):
        unit = cluster.levels[level]
        below = cluster.levels[level - 1].name if level else accelerator.name
        joins = f"{'  ' * depth}{unit.name}: {unit.children} × {below}"
        lines.append(f"{joins:<44}{cluster.holds(level):>8,} accelerators   {bandwidth(unit.bandwidth):>9} a direction"
                     f"   {seconds(unit.latency):>7}")
    return "\n".join(lines)


def cluster_svg(cluster: Cluster) -> str:
    """Boxes in boxes; of each level the first unit is drawn, and the number of all is written."""
    width = 1000
    height = 96 + _height(len(cluster.levels) - 1)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
             'font-family="Helvetica, Arial, sans-serif">',
             f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
             text_at(20, 32, f"{cluster.name}: {cluster.size:,} × {cluster.accelerator.name}", 20, _INK, weight="bold"),
             text_at(20, 54, f"{cluster.flops(next(iter(_best(cluster)))) / 1e18:.3g} EFLOP/s dense "
                             f"{next(iter(_best(cluster)))}; bandwidth of one direction, per accelerator", 13, _MUTED)]
    _unit(parts, cluster, len(cluster.levels) - 1, 20, 72, width - 40)
    return "\n".join([*parts, "</svg>", ""])


def _best(cluster: Cluster) -> list[str]:
    return [name for name in ("bf16", "fp16", *cluster.accelerator.peak) if name in cluster.accelerator.peak]


def _height(level: int) -> float:
    return 44 if level < 0 else _height(level - 1) + 46


def _unit(parts: list[str], cluster: Cluster, level: int, x: float, y: float, width: float, within: bool = True) -> None:
    """A unit of a level at (x, y), with what is ``within`` it: the first of its units in full, the next one closed.

    Level −1 is one accelerator.
    """
    height = _height(level)
    fill = _FILLS[(len(cluster.levels) - 1 - level) % len(_FILLS)]
    parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4" fill="{fill}" '
                 f'stroke="{_MUTED}" stroke-width="1"/>')
    if level < 0 or not within:
        return
    unit = cluster.levels[level]
    label = f"{unit.name}: {cluster.holds(level):,} accelerators, {bandwidth(unit.bandwidth)}, {seconds(unit.latency)}"
    parts.append(text_at(x + 8, y + 19, label, 12, _INK))
    x, y, room = x + 10, y + 30, width - 20
    if level == 0:
        shown = min(unit.children, 8)
        each = (room - (60 if unit.children > shown else 0)) / shown
        for child in range(shown):
            _unit(parts, cluster, -1, x + child * each, y, each - 5)
    else:
        shown = min(unit.children, 2)
        first = room - 44 * (shown - 1) - (60 if unit.children > shown else 0)
        _unit(parts, cluster, level - 1, x, y, first)
        if shown == 2:
            _unit(parts, cluster, level - 1, x + first + 8, y, 36, within=False)
    if unit.children > shown:
        parts.append(text_at(x + room, y + _height(level - 1) / 2 + 4, f"… × {unit.children}", 13, _INK, "end"))


def bars_svg(title: str, bars: Sequence[tuple[str, Mapping[str, float]]], unit: Callable[[float], str],
             limit: tuple[str, float] | None = None, facts: Sequence[str] = ()) -> str:
    """Bars of stacked parts.

    Args:
        bars: each with its label and its parts by name; equal names have equal colours.
        unit: writes a number.
        limit: a line across all bars, such as a memory's size, with its label.
        facts: lines below.
    """
    names = list(dict.fromkeys(name for _, parts in bars for name, value in parts.items() if value))
    colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
    left, row, top, plot = 16 + 7.2 * max(len(label) for label, _ in bars), 34, 64, 640
    most = max([sum(parts.values()) for _, parts in bars] + ([limit[1]] if limit else [])) or 1
    bottom = top + row * len(bars) + 10
    facts = [line for fact in facts for line in textwrap.wrap(fact, int((left + plot + 100) / 7.4))]
    legend = _legend(names, colours, left, bottom + 22, left + plot)
    height = bottom + 40 + 20 * (1 + len(legend[1]) + len(facts))
    width = left + plot + 130
    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" viewBox="0 0 {width:.0f} {height}" '
           'font-family="Helvetica, Arial, sans-serif">',
           f'<rect width="{width:.0f}" height="{height}" fill="#ffffff"/>', text_at(16, 30, title, 18, _INK, weight="bold")]
    for place, (label, parts) in enumerate(bars):
        y, x = top + row * place, left
        svg.append(text_at(left - 10, y + 17, label, 13, _INK, "end"))
        for name, value in parts.items():
            length = plot * value / most
            if value:
                svg.append(f'<rect x="{x:.1f}" y="{y}" width="{length:.2f}" height="24" fill="{colours[name]}">'
                           f'<title>{name} {unit(value)}</title></rect>')
            x += length
        svg.append(text_at(x + 8, y + 17, unit(sum(parts.values())), 13, _MUTED))
    if limit:
        x = left + plot * limit[1] / most
        svg.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 8}" y2="{bottom - 4}" stroke="{_INK}" stroke-dasharray="5 3"/>')
        svg.append(text_at(x, top - 12, limit[0], 12, _INK, "middle"))
    svg += legend[0]
    svg += [text_at(16, bottom + 48 + 20 * (len(legend[1]) + line), fact, 13, _INK) for line, fact in enumerate(facts)]
    return "\n".join([*svg, "</svg>", ""])


def _legend(names: Sequence[str], colours: Mapping[str, str], left: float, y: float, right: float) -> tuple[list[str], list[int]]:
    """Boxes with names, in as many rows as they need; and the rows after the first."""
    parts: list[str] = []
    rows: list[int] = []
    x = left
    for name in names:
        if x + 30 + 7.2 * len(name) > right + 100:
            x, y = left, y + 20
            rows.append(len(rows) + 1)
        parts.append(f'<rect x="{x:.1f}" y="{y - 11}" width="12" height="12" fill="{colours[name]}"/>')
        parts.append(text_at(x + 18, y, name, 13, _INK))
        x += 34 + 7.2 * len(name)
    return parts, rows
