"""A timeline of one rank: when its kernels ran, and when which collective was under way meanwhile.

    timeline = Overlap(device)           begins to listen
    trainer.step(ids, labels)
    timeline.stop()
    print(timeline.text())

Collectives of one layer and one operation are drawn on one line. A bar begins when a collective was started and ends when its
last step was done; kernels above a bar are computation that it was hidden behind.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque

from refdist.device.device import Device
from refdist.device.events import Event, Kernel, Phase

__all__ = ["Overlap"]

Span = tuple[float, float]
_COLLECTIVE = re.compile(r"([\w-]+) (?:of|on) (.*)")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class Overlap:
    """Kernels and collectives of one device, moment by moment.

    Attributes:
        kernels: (start, end) in seconds.
        collectives: what is under way, such as ``"gather 3"`` for layer 3 -> (start, end) of each.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.kernels: list[Span] = []
        self.collectives: dict[str, list[Span]] = {}
        self._began: defaultdict[str, deque[float]] = defaultdict(deque)  # of those that are under way, the oldest first
        device.listeners.append(self)

    def __call__(self, event: Event) -> None:
        """Note a kernel, or the beginning or end of a collective."""
        if isinstance(event, Kernel):
            self.kernels.append((event.start, event.end))
        elif isinstance(event, Phase) and _COLLECTIVE.fullmatch(event.name):
            if event.begins:
                self._began[event.name].append(event.time)
            else:
                self.collectives.setdefault(_label(event.name), []).append((self._began[event.name].popleft(), event.time))

    def stop(self) -> None:
        """Listen no longer."""
        self.device.listeners.remove(self)

    def hidden(self) -> float:
        """The part of the time with a collective under way in which a kernel ran."""
        network = _union([span for spans in self.collectives.values() for span in spans])
        both = sum(max(0.0, min(end, last) - max(start, first))
                   for start, end in _union(self.kernels) for first, last in network)
        return both / (sum(end - start for start, end in network) or 1.0)

    def text(self, width: int = 72) -> str:
        """One line of kernels, then one line for each layer's collectives, in the order in which they first began."""
        spans = self.kernels + [span for spans in self.collectives.values() for span in spans]
        if not spans:
            return "nothing has run"
        start, end = min(first for first, _ in spans), max(last for _, last in spans)
        rows = {"kernels": (self.kernels, "▇"), **{label: (bars, "░") for label, bars in
                                                   sorted(self.collectives.items(), key=lambda item: min(item[1]))}}
        wide = max(map(len, rows))
        lines = [f"{label:<{wide}}  {_bars(bars, start, (end - start) / width, width, mark)}".rstrip()
                 for label, (bars, mark) in rows.items()]
        return "\n".join([*lines, f"{'':<{wide}}  {'─' * width} {(end - start) * 1e3:.0f} ms"])


def _label(name: str) -> str:
    """``gather of model.layers.3.mlp.up_proj.weight`` -> ``gather 3``."""
    match = _COLLECTIVE.fullmatch(name)
    assert match is not None
    operation, what = match.groups()
    layer = _LAYER.match(what)
    if layer is not None:
        return f"{operation} {layer[1]}"
    if what.startswith("model.embed_tokens"):
        return f"{operation} embed"
    return f"{operation} head" if what in ("model.norm.weight", "lm_head.weight") else f"{operation} {what}"


def _bars(spans: list[Span], start: float, slot: float, width: int, mark: str) -> str:
    cells = [" "] * width
    for first, last in spans:
        for cell in range(int((first - start) / slot), min(width, int((last - start) / slot) + 1)):
            cells[cell] = mark
    return "".join(cells)


def _union(spans: list[Span]) -> list[Span]:
    """The same moments without overlaps, in order."""
    merged: list[Span] = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return merged
