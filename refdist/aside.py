"""Files that are written aside and renamed into place, so that under its own name a file is never half there."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_aside"]


def write_aside(path: str | os.PathLike[str], contents: str | bytes) -> None:
    """Write a file, text as UTF-8; what it held before stays if that fails."""
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_bytes(contents.encode() if isinstance(contents, str) else contents)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
