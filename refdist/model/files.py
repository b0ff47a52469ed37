"""Models on disk as Hugging Face transformers writes and reads them.

    directory/
      config.json
      model.safetensors                       or, in shards,   model-00001-of-00003.safetensors …
                                                               model.safetensors.index.json

What transformers wrote is read here, and what is written here transformers reads.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ..errors import ConfigError
from ..numerics.rounding import store
from .config import ModelConfig
from .layout import EMBEDDING, HEAD, parameter_shapes
from .params import check_params

__all__ = ["load_params", "save_params"]

FORMATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
OWN = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|" + re.escape(INDEX))  # what these files are called; others are not ours
DERIVED = "rotary_emb.inv_freq"  # old checkpoints hold the frequencies, which follow from the configuration


def load_params(path: str | os.PathLike[str], dtype: Any = None) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """Read a model.

    Args:
        path: the directory.
        dtype: number format of the parameters. None: float64 if any is stored so, else float32, to which float16 and
            bfloat16 widen exactly.

    Returns:
        The configuration; parameters by Hugging Face's names, in canonical order, C-contiguous.

    Raises:
        ConfigError: a missing or unreadable file, a missing, extra, wrongly shaped, truncated or non-floating-point tensor;
            it names the file, the tensor, what was found and what was expected.
    """
    directory = Path(path)
    config = ModelConfig.from_dict(_read_json(directory / CONFIG))
    files = _weight_files(directory)
    headers = {file: _header(file) for file in sorted(set(files.values()))}
    for name, file in files.items():
        if name not in headers[file]:
            raise ConfigError(f"{file}: tensor {name}: not found, expected by {INDEX}")
    stored = {name: (file, entry) for file, header in headers.items() for name, entry in header.items()}
    shapes = parameter_shapes(config)
    _check_stored(config, directory, stored, shapes)
    if dtype is None:
        dtype = np.float64 if any(stored[name][1]["dtype"] == "F64" for name in shapes) else np.float32
    wanted = {name: stored[name][0] for name in (*shapes, HEAD) if name in stored}
    params = {name: _contiguous(tensor, np.dtype(dtype)) for name, tensor in _tensors(wanted)}
    if config.tie_word_embeddings and HEAD in params and not np.array_equal(params[HEAD], params[EMBEDDING]):
        raise ConfigError(f"{wanted[HEAD]}: tensor {HEAD}: found other values, expected those of {EMBEDDING} (tied)")
    return config, {name: params[name] for name in shapes}


def save_params(
    path: str | os.PathLike[str],
    config: ModelConfig,
    params: Mapping[str, np.ndarray],
    dtype: Any = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a model into a directory, which is made if it is missing; what it held of another model is replaced.

    Everything is written aside first and then renamed, so that no half-written file ever has a final name.

    Args:
        params: all parameters of config.
        dtype: number format in the file: float64, float32, float16 or bfloat16 (of ml_dtypes). None: as they are.
        max_shard_bytes: several files are written if the parameters take more; no tensor is split.

    Raises:
        ConfigError: parameters that do not fit the configuration, or another number format.
        OSError: the directory cannot be written to.
    """
    check_params(config, params)
    dtype = np.dtype(params[EMBEDDING].dtype if dtype is None else dtype)
    if dtype not in FORMATS.values():
        raise ConfigError(f"dtype={dtype}: expected float64, float32, float16 or bfloat16")
    arrays = {name: _contiguous(params[name], dtype) for name in parameter_shapes(config)}
    directory = Path(path)
    directory.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        _write(aside, config, arrays, max_shard_bytes)
        directory.mkdir(exist_ok=True)
        written = sorted(aside.iterdir(), key=lambda file: (file.suffix == ".json", file.name))  # weights first
        for file in written:
            file.replace(directory / file.name)
        for old in [*directory.glob("model*.safetensors"), directory / INDEX]:
            if OWN.fullmatch(old.name) and old.name not in {file.name for file in written}:
                old.unlink(missing_ok=True)
    finally:
        shutil.rmtree(aside)


def _contiguous(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """x in C order and in this format, rounded once, to nearest even."""
    x = np.ascontiguousarray(x)
    return x if x.dtype == dtype else store(x, np.empty_like(x, dtype))


def _write(directory: Path, config: ModelConfig, arrays: dict[str, np.ndarray], max_shard_bytes: int) -> None:
    shards: list[dict[str, np.ndarray]] = [{}]
    for name, array in arrays.items():
        if shards[-1] and sum(a.nbytes for a in shards[-1].values()) + array.nbytes > max_shard_bytes:
            shards.append({})
        shards[-1][name] = array
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = [WEIGHTS]
    else:
        weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        total = sum(array.nbytes for array in arrays.values())
        _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(directory / CONFIG, {**config.to_dict(), "torch_dtype": str(arrays[EMBEDDING].dtype)})
    for file, shard in zip(names, shards, strict=True):
        try:
            save_file(shard, str(directory / file), metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{file}: {error}") from None
        (directory / file).chmod((directory / CONFIG).stat().st_mode)  # save_file's own is for this user alone


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; expected a model's {file.name}") from error
    except ValueError as error:
        raise ConfigError(f"{file}: no JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: found {type(values).__name__}, expected a JSON object")
    return values


def _weight_files(directory: Path) -> dict[str, Path]:
    """Tensor name -> file, as the index says; without an index the one file's own names."""
    if (directory / INDEX).exists():
        weight_map = _read_json(directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"{directory / INDEX}: found no weight_map, expected tensor names and their files")
        return {name: directory / file for name, file in weight_map.items()}
    return dict.fromkeys(_header(directory / WEIGHTS), directory / WEIGHTS)


def _header(file: Path) -> dict[str, Any]:
    """What the file says it holds, name -> {"dtype", "shape", "data_offsets"}, after checking that all of it is there."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length)) if 8 + length <= size else None
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; expected a model's weights") from error
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise ConfigError(f"{file}: found {size} bytes that do not begin with a header, expected a safetensors file")
    header.pop("__metadata__", None)
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        found = min(max(0, size - 8 - length - start), stop - start)
        if found < stop - start:
            raise ConfigError(f"{file}: tensor {name}: found {found} bytes, expected {stop - start}; the file is truncated")
    return header


def _check_stored(
    config: ModelConfig,
    directory: Path,
    stored: Mapping[str, tuple[Path, dict[str, Any]]],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    for name, shape in shapes.items():
        if name not in stored:
            raise ConfigError(f"{directory}: tensor {name}: not found in any file, expected shape {shape}")
        file, entry = stored[name]
        if tuple(entry["shape"]) != shape:
            raise ConfigError(f"{file}: tensor {name}: found shape {tuple(entry['shape'])}, expected {shape}")
        if entry["dtype"] not in FORMATS:
            raise ConfigError(f"{file}: tensor {name}: found format {entry['dtype']}, expected {' or '.join(FORMATS)}")
    for name, (file, entry) in stored.items():
        if name in shapes or name.endswith(DERIVED) or (config.tie_word_embeddings and name == HEAD):
            continue
        raise ConfigError(f"{file}: tensor {name}: found shape {tuple(entry['shape'])}, expected no such tensor")


def _tensors(files: Mapping[str, Path]) -> Iterator[tuple[str, np.ndarray]]:
    """Read the named tensors, file by file."""
    for file in sorted(set(files.values())):
        try:
            with safe_open(str(file), "np") as tensors:
                for name in files:
                    if files[name] == file:
                        yield name, tensors.get_tensor(name)
        except SafetensorError as error:
            raise ConfigError(f"{file}: {error}") from error
