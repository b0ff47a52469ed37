"""Models on disk: round trips, both ways with transformers where it is installed, and what cannot be read."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from models import SMALL, batch, model
from safetensors.numpy import load_file, save_file

from refdist.errors import ConfigError
from refdist.model import ModelConfig, init_params, parameter_shapes, reference
from refdist.model.files import load_params, save_params

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def same(got, want):
    assert list(got) == list(want)
    assert all(got[name].dtype == want[name].dtype and np.array_equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 5000, 1])
@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True, "attention_bias": True, "rope_scaling": LLAMA3}])
def test_round_trip(tmp_path, dtype, max_shard_bytes, options):
    config, params = model(dtype=dtype, **options)
    save_params(tmp_path / "new" / "model", config, params, max_shard_bytes=max_shard_bytes)
    got_config, got = load_params(tmp_path / "new" / "model")
    assert got_config == config
    same(got, params)
    assert all(a.flags.c_contiguous and a.flags.writeable for a in got.values())
    files = sorted(file.name for file in (tmp_path / "new" / "model").iterdir())
    assert ("model.safetensors.index.json" in files) == ("model.safetensors" not in files) == (max_shard_bytes <= 5000)
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["model"]  # nothing is left aside


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
def test_sixteen_bits_widen_exactly(tmp_path, stored):
    config, params = model(dtype=np.float32)
    save_params(tmp_path, config, params, dtype=stored)
    _, got = load_params(tmp_path)
    same(got, {name: p.astype(stored).astype(np.float32) for name, p in params.items()})
    same(load_params(tmp_path, stored)[1], {name: p.astype(stored) for name, p in params.items()})


def test_saving_again_replaces_what_was_there(tmp_path):
    config, params = model()
    save_params(tmp_path, config, params, max_shard_bytes=5000)
    (tmp_path / "notes.txt").write_text("mine")
    other_config, other = model(seed=1, tie_word_embeddings=True)
    save_params(tmp_path, other_config, other)
    assert load_params(tmp_path)[0] == other_config
    same(load_params(tmp_path)[1], other)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["config.json", "model.safetensors", "notes.txt"]


def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    config, params = model()
    save_params(tmp_path / "model", config, params)
    monkeypatch.setattr("refdist.model.files.save_file", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_params(tmp_path / "model", config, model(seed=1)[1])
    same(load_params(tmp_path / "model")[1], params)
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_files_get_their_names_by_renaming_the_configuration_last(tmp_path, monkeypatch):
    renamed, replace = [], Path.replace

    def recorded(self, target):
        renamed.append(Path(target).name)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", recorded)
    save_params(tmp_path / "model", *model())
    assert renamed == ["model.safetensors", "config.json"]


def test_what_cannot_be_saved(tmp_path):
    config, params = model()
    with pytest.raises(ConfigError, match="missing"):
        save_params(tmp_path / "x", config, {})
    with pytest.raises(ConfigError, match="dtype=int32"):
        save_params(tmp_path / "x", config, params, dtype=np.int32)
    assert not (tmp_path / "x").exists()


def test_a_format_of_16_bits_is_rounded_to_once(tmp_path):
    """1 + 2⁻⁸ + 2⁻³⁰ lies above the middle of two bfloat16 numbers; float32 on the way would put it there, and even is below."""
    config, params = model()
    name = "model.norm.weight"
    params[name] = np.full_like(params[name], 1 + 2.0**-8 + 2.0**-30)
    save_params(tmp_path, config, params, dtype=ml_dtypes.bfloat16)
    assert (load_params(tmp_path)[1][name] == 1 + 2.0**-7).all()
    save_params(tmp_path, config, params)
    assert (load_params(tmp_path, ml_dtypes.bfloat16)[1][name] == 1 + 2.0**-7).all()


def truncate(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def change(function):
    def spoil(path):
        tensors = load_file(path / "model.safetensors")
        function(tensors)
        save_file(tensors, path / "model.safetensors")

    return spoil


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: (path / "config.json").unlink(), "config.json: No such file or directory"),
        (lambda path: (path / "config.json").write_text("{"), "config.json: no JSON"),
        (lambda path: (path / "config.json").write_text("[1]"), "config.json: found list, expected a JSON object"),
        (lambda path: (path / "config.json").write_text("{}"), "lacks vocab_size"),
        (lambda path: (path / "model.safetensors").unlink(), "model.safetensors: No such file or directory"),
        (lambda path: (path / "model.safetensors").write_bytes(b""), "model.safetensors: found 0 bytes"),
        (lambda path: (path / "model.safetensors").write_bytes(b"x" * 50), "model.safetensors: found 50 bytes"),
        (truncate, r"model.safetensors: tensor \S+: found \d+ bytes, expected \d+; the file is truncated"),
        (change(lambda t: t.pop(NORM)), rf"tensor {NORM}: not found in any file, expected shape \(24,\)"),
        (change(lambda t: t.update(extra=np.ones((2, 3)))), r"tensor extra: found shape \(2, 3\), expected no such"),
        (change(lambda t: t.update({NORM: np.ones((3, 8))})), rf"tensor {NORM}: found shape \(3, 8\), expected \(24,\)"),
        (change(lambda t: t.update({NORM: np.ones(24, np.int64)})), rf"tensor {NORM}: found format I64, expected F64"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, spoil, message):
    save_params(tmp_path, *model())
    spoil(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_params(tmp_path)


def test_files_of_an_earlier_save_go_and_those_of_others_stay(tmp_path):
    config, params = model()
    save_params(tmp_path, config, params, max_shard_bytes=5000)
    others = ["model-notes.safetensors", "model_ema.safetensors", "model-1-of-2.safetensors"]
    for name in others:
        (tmp_path / name).write_bytes(b"mine")
    assert len(list(tmp_path.glob("model-0*.safetensors"))) > 2
    save_params(tmp_path, config, params)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(["config.json", "model.safetensors", *others])
    assert load_params(tmp_path)[0] == config


def test_a_shard_that_is_missing_or_incomplete_is_named(tmp_path):
    save_params(tmp_path, *model(), max_shard_bytes=5000)
    first = sorted(tmp_path.glob("model-*.safetensors"))[0]
    kept = first.read_bytes()
    first.unlink()
    with pytest.raises(ConfigError, match=rf"{first.name}: No such file"):
        load_params(tmp_path)
    save_file({"other": np.ones(1)}, first)
    with pytest.raises(ConfigError, match=rf"{first.name}: tensor model.embed_tokens.weight: not found, expected by"):
        load_params(tmp_path)
    first.write_bytes(kept)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(ConfigError, match="found no weight_map"):
        load_params(tmp_path)


def test_what_old_checkpoints_hold_besides(tmp_path):
    config, params = model(tie_word_embeddings=True)
    save_params(tmp_path, config, params)
    embedding = params["model.embed_tokens.weight"]
    more = {"lm_head.weight": embedding, "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3)}
    change(lambda t: t.update(more))(tmp_path)
    same(load_params(tmp_path)[1], params)
    change(lambda t: t.update({"lm_head.weight": embedding + 1}))(tmp_path)
    with pytest.raises(ConfigError, match=r"tensor lm_head\.weight: found other values"):
        load_params(tmp_path)


TRANSFORMERS = [
    {},
    {"tie_word_embeddings": True},
    {"attention_bias": True, "mlp_bias": True},
    {"rope_scaling": LLAMA3, "rope_theta": 5e5, "num_key_value_heads": 1},
]


@pytest.mark.parametrize("options", TRANSFORMERS)
@pytest.mark.parametrize(("dtype", "shard"), [("float32", "5GB"), ("bfloat16", "5GB"), ("float16", "5KB")])
def test_what_transformers_writes_we_read(tmp_path, options, dtype, shard):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs_config = transformers.LlamaConfig(**hugging_face({**SMALL, "max_position_embeddings": 64, **options}))
    theirs = transformers.LlamaForCausalLM(theirs_config).to(getattr(torch, dtype))
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    config, params = load_params(tmp_path)
    ids, _ = batch(config)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    state = theirs.state_dict()
    assert all(np.array_equal(params[name], state[name].float().numpy()) for name in parameter_shapes(config))
    with torch.no_grad():
        want = theirs(torch.from_numpy(ids)).logits.numpy()
    np.testing.assert_allclose(reference.logits(config, params, ids), want, atol=2e-4)


@pytest.mark.parametrize("options", TRANSFORMERS)
@pytest.mark.parametrize(("dtype", "shard"), [(np.float32, 10**9), (ml_dtypes.bfloat16, 10**9), (np.float32, 5000)])
def test_what_we_write_transformers_reads(tmp_path, options, dtype, shard):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = ModelConfig(**{**SMALL, "max_position_embeddings": 64, **options})
    save_params(tmp_path, config, init_params(config), dtype, shard)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert theirs.dtype == {np.float32: torch.float32, ml_dtypes.bfloat16: torch.bfloat16}[dtype]
    _, params = load_params(tmp_path)
    ids, _ = batch(config)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        want = theirs(torch.from_numpy(ids)).logits.numpy()
    np.testing.assert_allclose(reference.logits(config, params, ids), want, atol=2e-4)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"


def hugging_face(options):
    """Arguments of LlamaConfig, which in transformers 5 takes θ and scaling together."""
    rope = {"rope_theta": options["rope_theta"], "rope_type": "default", **(options.get("rope_scaling") or {})}
    return {k: v for k, v in options.items() if k not in ("rope_theta", "rope_scaling")} | {"rope_parameters": rope}


def test_shards_are_as_large_as_they_may_be(tmp_path):
    config, params = model(dtype=np.float32)
    total = sum(array.nbytes for array in params.values())
    save_params(tmp_path, config, params, max_shard_bytes=5000)
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"]["total_size"] == total
    save_params(tmp_path, config, params, max_shard_bytes=total)
    assert (tmp_path / "model.safetensors").exists()


def test_what_the_configuration_says_of_the_format(tmp_path):
    config, params = model(dtype=np.float32)
    save_params(tmp_path, config, params, dtype=ml_dtypes.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_one_tensor_in_float64_makes_all_wide(tmp_path):
    config, params = model()
    save_params(tmp_path, config, params)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert {array.dtype for array in load_params(tmp_path)[1].values()} == {np.dtype(np.float64)}
