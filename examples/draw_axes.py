"""Draw the picture of docs/overview.md: what each axis of a plan cuts, on two ranks of each.

    python examples/draw_axes.py docs/pictures
"""

import sys
from html import escape
from pathlib import Path

RANKS = ("#4c78a8", "#f58518")  # the colour of rank 0 and of rank 1
INK, FAINT, WHOLE = "#222222", "#8a8a8a", "#d9d9d9"
PANEL, HEIGHT, TOP = 208, 326, 74


class Panel:
    """One axis: a title, what it cuts, and rectangles."""

    def __init__(self, place: int, axis: str, cuts: str) -> None:
        self.left = 12 + place * PANEL
        self.parts = [self._words(self.left, 30, axis, 17, INK, "bold"), self._words(self.left, 50, cuts, 12, INK)]

    def _words(self, x: float, y: float, words: str, size: int, color: str, weight: str = "normal", anchor: str = "start") -> str:
        return (f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" font-weight="{weight}" text-anchor="{anchor}">'
                f"{escape(words)}</text>")

    def box(self, x: float, y: float, width: float, height: float, rank: int | None, words: str = "") -> None:
        """A rectangle of a rank's colour (grey: both have it), with words in the middle."""
        color = WHOLE if rank is None else RANKS[rank]
        self.parts.append(f'<rect x="{self.left + x:g}" y="{TOP + y:g}" width="{width:g}" height="{height:g}" fill="{color}" '
                          'stroke="white" stroke-width="2"/>')
        if words:
            middle = self.left + x + width / 2, TOP + y + height / 2 + 4
            self.parts.append(self._words(*middle, words, 11, INK if rank is None else "white", anchor="middle"))

    def note(self, x: float, y: float, words: str, anchor: str = "start") -> None:
        """Small words beside the rectangles."""
        self.parts.append(self._words(self.left + x, TOP + y, words, 11, FAINT, anchor=anchor))


def batch_axes(place: int) -> Panel:
    """dp: rows of the batch."""
    panel = Panel(place, "dp", "the batch")
    for row in range(4):
        panel.box(16, row * 24, 150, 24, row // 2, f"sequence {row}")
    panel.note(16, 116, "every rank: all weights")
    panel.box(16, 128, 70, 44, None, "weights")
    panel.box(96, 128, 70, 44, None, "weights")
    panel.note(16, 196, "all-reduce of gradients")
    return panel


def sharded_axis(place: int) -> Panel:
    """fsdp: the batch, and rows of each parameter."""
    panel = Panel(place, "fsdp", "the batch, and what is stored")
    for row in range(4):
        panel.box(16, row * 24, 150, 24, row // 2, f"sequence {row}")
    panel.note(16, 116, "rows of each weight")
    panel.box(16, 128, 150, 22, 0)
    panel.box(16, 150, 150, 22, 1)
    panel.note(16, 196, "all-gather of weights,")
    panel.note(16, 211, "reduce-scatter of gradients")
    return panel


def tensor_axis(place: int) -> Panel:
    """tp: columns, then rows, of the matrices of a layer."""
    panel = Panel(place, "tp", "hidden: heads, MLP, vocabulary")
    panel.note(16, 10, "[out, in] of q, k, v, gate, up")
    panel.box(16, 18, 110, 34, 0, "heads 0, 1")
    panel.box(16, 52, 110, 34, 1, "heads 2, 3")
    panel.note(16, 104, "[out, in] of o, down")
    panel.box(16, 112, 55, 60, 0)
    panel.box(71, 112, 55, 60, 1)
    panel.note(16, 196, "in each layer: all-gather and")
    panel.note(16, 211, "reduce-scatter of activations")
    return panel


def context_axis(place: int) -> Panel:
    """cp: the sequence, in zigzag."""
    panel = Panel(place, "cp", "the sequence")
    for row in range(4):
        for chunk, rank in enumerate((0, 1, 1, 0)):
            panel.box(16 + chunk * 38, row * 24, 38, 24, rank)
    for chunk in range(4):
        panel.note(35 + chunk * 38, 112, f"{chunk}", "middle")
    panel.note(16, 130, "zigzag: an early and a late")
    panel.note(16, 145, "part of each sequence")
    panel.note(16, 196, "in each attention: keys and")
    panel.note(16, 211, "values to the other ranks")
    return panel


def pipeline_axis(place: int) -> Panel:
    """pp: the layers."""
    panel = Panel(place, "pp", "the layers")
    for place_in_stack, words in enumerate(("embedding", "layer 0", "layer 1", "layer 2", "layer 3", "norm, head")):
        panel.box(16, place_in_stack * 29, 120, 29, place_in_stack // 3, words)
    panel.note(16, 196, "between stages: activations")
    panel.note(16, 211, "and their gradients")
    return panel


def svg() -> str:
    """The picture."""
    panels = [draw(place) for place, draw in enumerate((batch_axes, sharded_axis, tensor_axis, context_axis, pipeline_axis))]
    width = 12 + PANEL * len(panels)
    key = [f'<rect x="{28 + 80 * place}" y="304" width="12" height="12" fill="{color}"/>'
           f'<text x="{46 + 80 * place}" y="315" font-size="12" fill="{INK}">{words}</text>'
           for place, (words, color) in enumerate((("rank 0", RANKS[0]), ("rank 1", RANKS[1]), ("both", WHOLE)))]
    parts = "\n".join(part for panel in panels for part in panel.parts)
    body = "\n".join([parts, *key])
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}" '
            f'font-family="sans-serif">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n')


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/draw_axes.py FOLDER")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "axes.svg").write_text(svg(), encoding="utf-8")
    print("1 picture")
