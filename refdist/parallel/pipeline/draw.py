"""Charts of schedules: a row a stage, time to the right, a box an action with the number of its micro-batch in it.

    stage 0  ┃0┃1┃2┃3┃           ┃  0  ┃4┃  1  ┃5┃          blue forward, green backward,
    stage 1    ┃0┃1┃2┃     ┃  0  ┃3┃  1  ┃4┃  2             teal input gradient, orange weight gradient;
    stage 2      ┃0┃1┃  0  ┃2┃  1  ┃3┃  2  ┃                further chunks in lighter shades

For the terminal (``terminal_chart``, a rich Text) and as SVG (``svg_chart``). Both draw spans: those that ``timing.simulate``
gives, or those that a ``timing.Recorder`` has measured in a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from xml.sax.saxutils import escape

from rich.style import Style
from rich.text import Text

from refdist.parallel.pipeline.action import KINDS
from refdist.parallel.pipeline.timing import Span

__all__ = ["LETTERS", "legend_kinds", "svg_chart", "terminal_chart", "text_at"]

Lanes = Sequence[Sequence[Span]]

COLORS = {"F": (0x35, 0x6F, 0xC4), "B": (0x2E, 0x94, 0x5C), "I": (0x1F, 0x9A, 0xA8), "W": (0xE0, 0x8A, 0x1E)}
_INK, _MUTED, _IDLE = "#1c2733", "#5d6b7a", "#eceff3"
_LABEL, _ROW, _GAP, _TOP, _SIDE = 78, 30, 6, 58, 210  # pixels: label column, row height, space between, title, right column
LETTERS = str.maketrans("FBIW", "fbiw")


def legend_kinds(lanes: Lanes) -> list[tuple[str, int]]:
    """The (kind, chunk) pairs that a chart needs a legend for, in the order of F, B, I, W."""
    return sorted({(span.action.kind, span.action.chunk) for lane in lanes for span in lane},
                  key=lambda pair: (list(KINDS).index(pair[0]), pair[1]))


def _color(kind: str, chunk: int, odd: bool = False) -> tuple[int, int, int]:
    """Of an action: lighter for later chunks; in the terminal slightly darker for every other micro-batch, to part neighbours."""
    white = min(0.52 * chunk, 0.78)
    shade = 0.86 if odd else 1.0
    red, green, blue = (round(((1 - white) * part + white * 255) * shade) for part in COLORS[kind])
    return red, green, blue


# ------------------------------------------------------------------------------------------------------- terminal


def terminal_chart(lanes: Lanes, width: int, color: bool, notes: Sequence[str] = ()) -> Text:
    """The chart as text.

    Args:
        lanes: each stage's spans.
        width: columns that there are; a chart is never made narrower than its numbers need, and may then be wider.
        color: boxes are coloured and hold numbers; without, they hold kind and number, in small letters for later chunks.
        notes: one for each stage, to the right of it.
    """
    begin, end = _extent(lanes)
    label = len(f"stage {len(lanes) - 1}") + 2
    room = width - label - max(map(len, notes), default=0) - 2
    digits = max((len(str(span.action.micro_batch)) for lane in lanes for span in lane), default=1)
    shortest = min((span.end - span.start for lane in lanes for span in lane), default=1)
    least = (digits + (0 if color else 1)) / float(shortest)  # columns per unit of time at which every number fits
    scale = max(min(4.0 / float(shortest), room / float(end - begin)), least if least * float(end - begin) < 4 * room else 0)
    if not color:
        scale = max(scale, least + 1 / float(shortest))
    scale = int(scale * float(shortest)) / float(shortest) if scale * float(shortest) >= 1 else scale
    chart = Text(no_wrap=True)
    for stage, lane in enumerate(lanes):
        chart.append(f"stage {stage}".ljust(label))
        column = 0
        for span, half in _halves(lane):
            times = _half_of(span, half)
            start, stop = (round(float(time - begin) * scale) for time in times)
            chart.append(" " * (start - column) if color else "·" * (start - column))
            chart.append(_box(span, stop - max(start, column), color), _style(span) if color else None)
            column = max(stop, column)
        columns = round(float(end - begin) * scale)
        chart.append((" " if color else "·") * (columns - column))
        chart.append(f"  {notes[stage]}\n" if notes else "\n")
    return chart


def _box(span: Span, width: int, color: bool) -> str:
    action = span.action
    kind = "" if color else action.kind.translate(LETTERS) if action.chunk else action.kind
    text = f"{kind}{action.micro_batch}"
    return (text.center(width) if color else text.ljust(width)) if len(text) <= width else " " * width


def _style(span: Span) -> Style:
    kind, micro_batch, chunk = span.action
    background = "#{:02x}{:02x}{:02x}".format(*_color(kind, chunk, micro_batch % 2 == 1))
    return Style(color="#ffffff" if chunk == 0 else "#101820", bgcolor=background, bold=chunk == 0)


def _halves(lane: Sequence[Span]) -> Iterator[tuple[Span, int | None]]:
    """Each span; with 0 and 1 for the two of a pair that overlap, from the same beginning to the same end."""
    for index, span in enumerate(lane):
        if index + 1 < len(lane) and lane[index + 1][1:] == span[1:]:
            yield span, 0
        elif index and lane[index - 1][1:] == span[1:]:
            yield span, 1
        else:
            yield span, None


def _half_of(span: Span, half: int | None) -> tuple[Any, Any]:
    """Where a span is drawn when a row can hold one box at a time."""
    middle = (span.start + span.end) / 2
    return {None: (span.start, span.end), 0: (span.start, middle), 1: (middle, span.end)}[half]


def _extent(lanes: Lanes) -> tuple[Any, Any]:
    return min(lane[0].start for lane in lanes if lane), max(lane[-1].end for lane in lanes if lane)


# ------------------------------------------------------------------------------------------------------------ SVG


def svg_chart(lanes: Lanes, title: str, facts: Sequence[str], notes: Sequence[str], unit: str = "", width: int = 1280) -> str:
    """The chart as an SVG document.

    Args:
        lanes: each stage's spans.
        title: above the chart.
        facts: lines below it, such as bubble and formula.
        notes: one for each stage, to the right of it.
        unit: of time, for the axis.
        width: of the picture in pixels; the rows share what labels and notes leave.
    """
    begin, end = _extent(lanes)
    scale = (width - _LABEL - _SIDE) / float(end - begin)
    bottom = _TOP + len(lanes) * (_ROW + _GAP)
    height = bottom + 74 + 20 * len(facts)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
             'font-family="Helvetica, Arial, sans-serif">',
             f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
             text_at(16, 32, title, 20, _INK, weight="bold")]
    for stage, lane in enumerate(lanes):
        y = _TOP + stage * (_ROW + _GAP)
        parts.append(text_at(_LABEL - 12, y + 20, f"stage {stage}", 14, _INK, "end"))
        parts.append(f'<rect x="{_LABEL}" y="{y}" width="{(end - begin) * scale:.2f}" height="{_ROW}" fill="{_IDLE}"/>')
        for span, half in _halves(lane):
            top, row = (y, _ROW) if half is None else (y + half * _ROW / 2, _ROW / 2)
            x, length = _LABEL + float(span.start - begin) * scale, float(span.end - span.start) * scale
            parts.append(_svg_box(span, x, top, length, row))
        parts.append(text_at(width - _SIDE + 14, y + 20, notes[stage], 13, _MUTED))
    parts += _axis(float(end - begin), scale, bottom, unit)
    parts += _legend(lanes, bottom + 44)
    parts += [text_at(_LABEL, bottom + 80 + 20 * line, fact, 14, _INK) for line, fact in enumerate(facts)]
    return "\n".join([*parts, "</svg>", ""])


def _svg_box(span: Span, x: float, y: float, width: float, height: float) -> str:
    kind, micro_batch, chunk = span.action
    fill = "#{:02x}{:02x}{:02x}".format(*_color(kind, chunk))
    box = (f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}" fill="{fill}" stroke="#ffffff" '
           f'stroke-width="{min(1.2, width / 8):.2f}"><title>{escape(str(span.action))}</title></rect>')
    text = str(micro_batch)
    size = min(15.0, 1.5 * width / len(text), 0.8 * height)
    if size < 6.5:
        return box
    ink = "#ffffff" if chunk == 0 else _INK
    return box + text_at(x + width / 2, y + height / 2 + size * 0.35, text, size, ink, "middle", "bold")


def _axis(length: float, scale: float, y: float, unit: str) -> list[str]:
    """Ticks at round numbers, about every 90 pixels."""
    step = 10.0 ** len(str(int(length))) if length >= 1 else 1.0
    while step * scale > 90:
        step /= 2 if str(step).lstrip("0.")[0] in "12" else 2.5
    parts = [f'<line x1="{_LABEL}" y1="{y + 2}" x2="{_LABEL + length * scale:.2f}" y2="{y + 2}" stroke="{_MUTED}"/>']
    for tick in range(int(length / step + 1e-9) + 1):
        x = _LABEL + tick * step * scale
        parts.append(f'<line x1="{x:.2f}" y1="{y + 2}" x2="{x:.2f}" y2="{y + 7}" stroke="{_MUTED}"/>')
        parts.append(text_at(x, y + 20, f"{tick * step:g}" + (f" {unit}" if unit and tick == 0 else ""), 11, _MUTED, "middle"))
    return parts


def _legend(lanes: Lanes, y: float) -> list[str]:
    """A box for each kind and chunk, the kinds' names, and which shade is which chunk."""
    pairs = legend_kinds(lanes)
    chunks = 1 + max(chunk for _, chunk in pairs)
    parts, x = [], float(_LABEL)
    for kind in dict.fromkeys(kind for kind, _ in pairs):
        for chunk in range(chunks):
            fill = "#{:02x}{:02x}{:02x}".format(*_color(kind, chunk))
            parts.append(f'<rect x="{x}" y="{y - 11}" width="14" height="14" fill="{fill}"/>')
            x += 14
        parts.append(text_at(x + 6, y + 1, f"{kind}  {KINDS[kind]}", 13, _INK))
        x += 34 + 7.2 * len(f"{kind}  {KINDS[kind]}")
    parts.append(f'<rect x="{x}" y="{y - 11}" width="14" height="14" fill="{_IDLE}"/>')
    shades = f"      shades: chunk 0 to chunk {chunks - 1}" if chunks > 1 else ""
    return [*parts, text_at(x + 20, y + 1, f"idle{shades}", 13, _INK)]


def text_at(x: float, y: float, text: str, size: float, fill: str, anchor: str = "start", weight: str = "normal") -> str:
    """An SVG text element; ``y`` is its baseline."""
    return (f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size:.1f}" fill="{fill}" text-anchor="{anchor}" '
            f'font-weight="{weight}" xml:space="preserve">{escape(text)}</text>')
