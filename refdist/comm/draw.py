"""Pictures of a :class:`~refdist.comm.tracing.Trace`: as text, and as SVG.

In both, each step has a row for each rank and a column for each chunk. A cell shows whose contributions it holds; what has just
come is set off; a sum that is complete is marked.
"""

from __future__ import annotations

from html import escape

from refdist.comm.tracing import Content, Message, Step, Trace

__all__ = ["svg", "text"]

_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#eeca3b", "#9d755d",
           "#83bcb6", "#ff9da6", "#439894", "#d6a5c9", "#79706e", "#a0cbe8", "#8cd17d", "#bab0ac")
_INK, _FAINT = "#222222", "#c8c8c8"


def chunks(contents: tuple[Content, ...]) -> str:
    """``c2``, ``c0 c3``, or ``c1–c4`` for neighbours."""
    numbers = list(dict.fromkeys(content.chunk for content in contents))
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"c{numbers[0]}–c{numbers[-1]}"
    return " ".join(f"c{number}" for number in numbers)


def _label(trace: Trace, message: Message) -> str:
    """What a message carries, in few letters."""
    if trace.operation == "barrier":
        return ""
    if trace.operation == "all_to_all":
        blocks = [f"{content.ranks[0]}→{content.chunk}" for content in message.contents]
        return " ".join(blocks) if len(blocks) <= 2 else f"{len(blocks)} blocks"
    return chunks(message.contents)


def _heading(trace: Trace, column: int) -> str:
    return "heard of" if trace.operation == "barrier" else f"b{column}" if trace.operation == "all_to_all" else f"c{column}"


def _arrived(step: Step, rank: int, contents: list[Content]) -> bool:
    """Whether a cell has changed in this step."""
    came = [content for message in step.messages if message.dest == rank for content in message.contents]
    return any(new.chunk == content.chunk and set(new.ranks) <= set(content.ranks) for content in contents for new in came)


def _adds(trace: Trace) -> bool:
    return trace.reducing or trace.operation == "barrier"


# ------------------------------------------------------------------------------------------------------------ text


def text(trace: Trace) -> str:
    """The steps, one below the other. ``01··`` holds the contributions of ranks 0 and 1; ``*`` has just come."""
    lines = [trace.title, *_key(trace)]
    for number, step in enumerate(trace.steps):
        lines += ["", "start" if number == 0 else f"step {number}"]
        arrows = [f"{message.source} ─▶ {message.dest} {_label(trace, message)}".rstrip() for message in step.messages]
        for start in range(0, len(arrows), 6):
            lines.append("  " + "   ".join(arrows[start:start + 6]))
        rows = [[_cell(trace, step, rank, column) for column in range(trace.columns)] for rank in range(trace.ranks)]
        width = max(len(_heading(trace, trace.columns - 1)), *(len(cell) for row in rows for cell in row))
        lines.append("           " + " ".join(f"{_heading(trace, column):<{width}}" for column in range(trace.columns)).rstrip())
        lines += [f"  rank {rank:>2}  " + " ".join(f"{cell:<{width}}" for cell in row).rstrip() for rank, row in enumerate(rows)]
    return "\n".join(lines)


def _key(trace: Trace) -> list[str]:
    """How to read a cell."""
    if trace.operation == "barrier":
        return ["01··: has heard of ranks 0 and 1   *: just now"]
    if trace.operation == "all_to_all":
        return ["b0, b1, …: places for blocks   0→2: the block from rank 0 for rank 2   *: has just come"]
    number = "01··: the sum of what ranks 0 and 1 have there" if trace.reducing else "0: the data of rank 0"
    return [f"c0, c1, …: chunks of the array   {number}   ·: nothing yet   *: has just come"]


def _cell(trace: Trace, step: Step, rank: int, column: int) -> str:
    contents = step.held[rank].get(column, [])
    if not contents:
        return "·"
    if trace.operation == "all_to_all":
        words = ",".join(f"{content.ranks[0]}→{content.chunk}" for content in contents)
    elif _adds(trace):
        words = "".join(f"{r:x}" if r in contents[0].ranks else "·" for r in range(trace.ranks))
    else:
        words = str(contents[0].ranks[0])
    return words + "*" * _arrived(step, rank, contents)


# ------------------------------------------------------------------------------------------------------------- SVG

_CELL, _ROW, _GAP, _LEFT, _TOP = 34, 28, 26, 52, 66


def svg(trace: Trace) -> str:
    """The steps side by side, up to four in a line: a bar of its own colour for each rank's contribution."""
    reach = 16 + 9 * trace.ranks  # how far arrows bulge
    longest = max([0, *(len(_label(trace, message)) for step in trace.steps for message in step.messages)])
    margin = reach + 7 * longest + 18
    cell = max(_CELL, 76 if trace.operation == "barrier" else 4 * trace.ranks)
    width = _LEFT + margin + trace.columns * cell + margin
    height = trace.ranks * _ROW + 46
    across = max(1, min(len(trace.steps), 1300 // (width + _GAP), 4))
    down = -(-len(trace.steps) // across)
    full_width, full_height = max(across * (width + _GAP) + _GAP, 320 + 34 * trace.ranks), _TOP + down * (height + _GAP)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {full_width} {full_height}" width="{full_width}" '
             f'height="{full_height}" font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="13" fill="{_INK}">',
             f"<title>{escape(trace.title)}</title>",
             '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
             f'<path d="M0 0 L8 4 L0 8 z" fill="{_INK}"/></marker></defs>',
             f'<rect width="{full_width}" height="{full_height}" fill="white"/>',
             f'<text x="{_GAP}" y="32" font-size="20" font-weight="bold">{escape(trace.title)}</text>', _legend(trace)]
    for number, step in enumerate(trace.steps):
        x = _GAP + number % across * (width + _GAP)
        y = _TOP + number // across * (height + _GAP)
        parts.append(f'<g transform="translate({x} {y})">')
        parts += _panel(trace, step, "start" if number == 0 else f"step {number}", _LEFT + margin, cell, reach)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(trace: Trace) -> str:
    """Whose colour is whose."""
    words, start = ("contribution of rank", _GAP + 136) if _adds(trace) else ("from rank", _GAP + 72)
    end = start + 34 * trace.ranks + 12
    return "".join([
        f'<text x="{_GAP}" y="54">{words}</text>',
        *(f'<rect x="{start + 34 * rank}" y="43" width="13" height="13" fill="{_COLORS[rank]}"/>'
          f'<text x="{start + 34 * rank + 16}" y="54">{rank}</text>' for rank in range(trace.ranks)),
        f'<rect x="{end}" y="43" width="15" height="13" fill="none" stroke="{_INK}" stroke-width="2.4"/>',
        f'<text x="{end + 21}" y="54">has just come</text>'])


def _panel(trace: Trace, step: Step, name: str, left: float, cell: float, reach: float) -> list[str]:
    """One step: its cells and its arrows."""
    right, top = left + trace.columns * cell, 40
    parts = [f'<text x="0" y="14" font-size="15" font-weight="bold">{name}</text>']
    parts += [f'<text x="{left + (column + 0.5) * cell}" y="{top - 8}" text-anchor="middle" fill="#666666">'
              f"{_heading(trace, column)}</text>" for column in range(trace.columns)]
    for rank in range(trace.ranks):
        y = top + rank * _ROW
        parts.append(f'<text x="0" y="{y + _ROW / 2 + 5}">rank {rank}</text>')
        for column in range(trace.columns):
            parts += _box(trace, step, rank, column, left + column * cell, y, cell)
    for message in step.messages:
        parts.append(_arrow(message, _label(trace, message), left, right, top, reach / max(1, trace.ranks - 1)))
    return parts


def _box(trace: Trace, step: Step, rank: int, column: int, x: float, y: float, cell: float) -> list[str]:
    """A cell: bars of the ranks whose contributions it holds, or blocks one beside the other."""
    contents = step.held[rank].get(column, [])
    inner_x, inner_y, width, height = x + 3, y + 3, cell - 6, _ROW - 6
    parts = []
    if _adds(trace) and contents:
        bar = width / trace.ranks
        parts += [f'<rect x="{inner_x + r * bar:.2f}" y="{inner_y}" width="{bar:.2f}" height="{height}" fill="{_COLORS[r]}"/>'
                  for r in contents[0].ranks]
    else:
        part = width / max(1, len(contents))
        for place, content in enumerate(contents):
            source = content.ranks[0]
            parts.append(f'<rect x="{inner_x + place * part:.2f}" y="{inner_y}" width="{part:.2f}" height="{height}" '
                         f'fill="{_COLORS[source]}"/>')
            if trace.operation == "all_to_all":
                parts.append(f'<text x="{inner_x + (place + 0.5) * part:.2f}" y="{y + _ROW / 2 + 4}" text-anchor="middle" '
                             f'font-size="11" fill="white">{"" if part < 20 else f"{source}→"}{content.chunk}</text>')
    new = bool(contents) and _arrived(step, rank, contents)
    complete = trace.reducing and bool(contents) and len(contents[0].ranks) == trace.ranks
    stroke, thick = (_INK, 2.4) if new else ("#666666", 1.4) if complete else (_FAINT, 1)
    parts.append(f'<rect x="{inner_x}" y="{inner_y}" width="{width}" height="{height}" fill="none" stroke="{stroke}" '
                 f'stroke-width="{thick}"/>')
    return parts


def _arrow(message: Message, label: str, left: float, right: float, top: float, bulge: float) -> str:
    """Downwards on the right, upwards on the left, further out the further it goes."""
    down = message.dest > message.source
    edge, sign = (right + 2, 1) if down else (left - 2, -1)
    y0, y1 = (top + (rank + 0.5) * _ROW + offset for rank, offset in ((message.source, 5 if down else -5),
                                                                     (message.dest, -5 if down else 5)))
    out = edge + sign * (10 + bulge * abs(message.dest - message.source)) * 4 / 3
    tip = edge + sign * (10 + bulge * abs(message.dest - message.source))
    dashes = "" if message.contents else 'stroke-dasharray="4 3" '  # nothing but a header
    path = f'<path d="M{edge:.1f} {y0:.1f} C{out:.1f} {y0:.1f} {out:.1f} {y1:.1f} {edge:.1f} {y1:.1f}" fill="none" ' \
           f'{dashes}stroke="{_INK}" stroke-width="1.3" marker-end="url(#head)"/>'
    anchor = "start" if down else "end"
    return path + f'<text x="{tip + sign * 3:.1f}" y="{(y0 + y1) / 2 + 4:.1f}" text-anchor="{anchor}" font-size="11" ' \
                  f'stroke="white" stroke-width="3" paint-order="stroke">{escape(label)}</text>'
