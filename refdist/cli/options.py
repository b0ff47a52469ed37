"""Command-line options made from dataclass fields, so that a new field of Plan or ModelConfig is an option at once.

    hidden_size: int = 64        ->  --hidden-size N
    sequence_parallel: bool      ->  --sequence-parallel, --no-sequence-parallel
    schedule: str                ->  --schedule NAME
    layers_per_stage: tuple      ->  --layers-per-stage 2,3,3          (a tuple or list: commas)
    rope_scaling: dict           ->  --rope-scaling '{"factor": 8}'    (a dict: JSON)
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import io
import json
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "small": {
        "vocab_size": 256,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "bench": {
        "vocab_size": 256,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
}


SEARCHED_FOR = "searched for, unless it is given"  # in place of a default


class Help(argparse.HelpFormatter):
    """Keeps command lines as they are written, and fills the paragraphs between them."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = [part if part.startswith("    ") else super(Help, self)._fill_text(part, width, indent)
                 for part in text.split("\n\n")]
        return "\n\n".join(parts)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        commands = re.match(r"(argument|the following arguments are required:) ([\w-]+(?:\|[\w-]+)+)", message)
        if commands:
            word = re.search(r"invalid choice: ('.*?') \(", message)
            names = commands[2].replace("|", ", ")
            message = f"{word[1] + ': ' if word else ''}expected one of {names}; `{self.prog} --help` describes them"
        self.exit(2, f"{self.prog}: {message}\n")


def add_command(commands: Any, name: str, module: types.ModuleType) -> None:
    """Add a command to `commands`, what `add_subparsers` has given: its module's docstring is what its help says."""
    summary, _, more = (module.__doc__ or "").partition("\n")
    more = more.strip("\n")
    if more.startswith("    "):
        more = "examples:\n\n" + more
    parser = commands.add_parser(name, help=summary, description=summary, epilog=more, formatter_class=Help)
    parser.set_defaults(parser=parser)
    module.add_arguments(parser)


def refuse_unknown(parser: Parser, unknown: Sequence[str]) -> NoReturn:
    """End with one line on what nobody knows on a command line, and what may have been meant."""
    word = next((word for word in unknown if word.startswith("-")), unknown[0])
    if not word.startswith("-"):
        option = f"--{word.partition('=')[0].replace('_', '-')}"
        meant = f" (perhaps {option})" if option in parser._option_string_actions else ""
        parser.error(f"unexpected argument {word!r}{meant}; `{parser.prog} --help` says what is expected")
    name = word.partition("=")[0]
    options = list(parser._option_string_actions)
    near = [option for option in options if option.startswith(name)] or difflib.get_close_matches(name, options, 5, 0.76)
    closest = max(near, key=lambda option: option[:3] == name[:3], default="")  # of equals, one with the same first letter
    perhaps = f" (perhaps {closest})" if closest else ""
    parser.error(f"unknown option {name}{perhaps}; `{parser.prog} --help` lists those there are")


def add_fields(group: argparse._ArgumentGroup, owner: type, defaults: dict[str, Any] | None = None) -> None:
    """Add an option for each field of the dataclass `owner`; what is not given on the command line stays unset."""
    hints = typing.get_type_hints(owner)
    for field in dataclasses.fields(owner):
        default = (defaults or {}).get(field.name, field.default)
        add_field(group, field.name, hints[field.name], default, field.metadata.get("help", ""))


def add_field(group: argparse._ArgumentGroup, name: str, hint: Any, default: Any, text: str) -> None:
    """Add the option of one field, by its type; `text` is its help."""
    kinds = [kind for kind in _alternatives(hint) if kind is not type(None)]
    options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
    said = "" if default in (dataclasses.MISSING, None) else f"({default})" if default == SEARCHED_FOR else f"(default {default})"
    options["help"] = f"{text} {said}".strip()
    choices = [choice for kind in kinds if typing.get_origin(kind) is typing.Literal for choice in typing.get_args(kind)]
    if bool in kinds:
        options["action"] = argparse.BooleanOptionalAction
    elif choices:
        options["choices"], options["type"] = choices, type(choices[0])
    else:
        options["type"], options["metavar"] = _reader(kinds)
    group.add_argument("--" + name.replace("_", "-"), **options)


def given(owner: type, args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `owner` that were given on the command line."""
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(owner) if hasattr(args, field.name)}


def _alternatives(hint: Any) -> Sequence[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [kind for part in typing.get_args(hint) for kind in _alternatives(part)]
    return [hint]


def _reader(kinds: Sequence[Any]) -> tuple[Callable[[str], Any], str]:
    """The function that reads an option's text, and the word that stands for it in the help."""
    plain = [typing.get_origin(kind) or kind for kind in kinds]
    if dict in plain or any(isinstance(kind, type) and issubclass(kind, typing.Mapping) for kind in plain):
        return _json, "JSON"
    if tuple in plain or list in plain:
        return _integers, "N,N,…"
    if float in plain:
        return float, "X"
    return (int, "N") if int in plain else (str, "NAME")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers with commas between them, not {text!r}") from None


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, not {text!r}")
    return int(text)


def natural(text: str) -> int:
    """Read a whole number of at least 0."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 0, not {text!r}")
    return int(text)


def path(text: str) -> Path:
    """Read the name of a file or folder; an empty one, as of a variable that is not set, would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("expected the name of a file or folder, not an empty one")
    return Path(text)


def output_file(text: str) -> str:
    """Read the name of a file that is going to be written: its folder is there, and it is no folder itself."""
    file = Path(text)
    if file.is_dir() or not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, not {text!r}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a file that can be written to, not {text!r}")
    return text


def scale(text: str) -> str | float:
    """Read a loss scale: dynamic, or a number above 0."""
    try:
        number = 1.0 if text == "dynamic" else float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected dynamic, or a number above 0, not {text!r}")
    return text if text == "dynamic" else number


def above_0(text: str) -> float:
    """Read a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, not {text!r}")
    return value


def memory_size(text: str) -> int:
    """Read a number of bytes, such as 64MiB, 1.5GB or 4096."""
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    number = text.rstrip("BKMGibkmg").strip()
    unit = text[len(number):].strip().upper()
    try:
        size = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"expected a size such as 64MiB, not {text!r}")
    return size


def counted(number: int, noun: str) -> str:
    """"1 rank", "4 ranks"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def say(text: str) -> None:
    """One line on standard error, if that can be written to."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        forget(sys.stderr)


def forget(stream: IO[Any]) -> None:
    """What is still to be written to a stream, also at the end of the process, goes nowhere."""
    with contextlib.suppress(io.UnsupportedOperation):  # no file, in a test or a notebook
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
