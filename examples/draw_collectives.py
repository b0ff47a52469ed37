"""Draw the pictures of docs/collectives.md into a folder.

    python examples/draw_collectives.py docs/pictures
"""

import sys
from pathlib import Path

from refdist.comm import trace

PICTURES = {
    "all_reduce": ["ring", "direct", "recursive_doubling", "rabenseifner", "tree", "double_tree", "hierarchical"],
    "reduce_scatter": ["ring", "recursive_halving"],
    "all_gather": ["bruck", "recursive_doubling"],
    "broadcast": ["binomial", "scatter_all_gather", "chain"],
    "all_to_all": ["pairwise", "bruck"],
}


def draw(folder: Path) -> None:
    """Write one SVG file for each picture of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    for operation, algorithms in PICTURES.items():
        for algorithm in algorithms:
            picture = trace(operation, algorithm, ranks=8 if algorithm == "double_tree" else 4)
            (folder / f"{operation.replace('_', '-')}-{algorithm}.svg").write_text(picture.svg(), encoding="utf-8")
    (folder / "all-reduce-folded.svg").write_text(trace("all_reduce", "recursive_doubling", ranks=5).svg(), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/draw_collectives.py FOLDER")
    draw(Path(sys.argv[1]))
