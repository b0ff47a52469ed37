import numpy as np
import pytest
from models import SMALL, batch, model

from refdist.errors import ConfigError
from refdist.model import ModelConfig, check_batch, init_parameter, init_params, layout, parameter_shapes
from refdist.model.params import check_params
from refdist.numerics import FORMATS, round_to

FULL = ModelConfig(**SMALL, attention_bias=True, mlp_bias=True)


def test_initial_values():
    params = init_params(FULL, seed=3)
    for name, value in params.items():
        assert value.dtype == np.float32
        if name.endswith("norm.weight"):
            assert (value == 1).all()
        elif name.endswith("bias"):
            assert (value == 0).all()
        else:
            assert abs(value.std() / 0.3 - 1) < 0.2
            assert len(np.unique(value)) > 0.99 * value.size
    assert not np.array_equal(params["model.layers.0.mlp.up_proj.weight"], params["model.layers.1.mlp.up_proj.weight"])
    assert not np.array_equal(params["lm_head.weight"], init_params(FULL, seed=4)["lm_head.weight"])


@pytest.mark.parametrize("name", parameter_shapes(FULL))
def test_a_shard_draws_the_numbers_of_the_whole(name):
    whole = init_params(FULL, 5, np.float64)[name]
    for dimension in range(whole.ndim):
        for ranks in (2, 3, 5):
            for part in np.array_split(np.arange(whole.shape[dimension]), ranks):
                box = [slice(0, n) for n in whole.shape]
                box[dimension] = slice(int(part[0]), int(part[-1]) + 1)
                got = init_parameter(FULL, name, 5, box, np.float64)
                assert np.array_equal(got, whole[tuple(box)])


def test_all_formats_start_from_the_same_model():
    double, single = init_params(FULL, 1, np.float64), init_params(FULL, 1, np.float32)
    assert all(np.array_equal(double[name].astype(np.float32), single[name]) for name in double)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_formats_of_16_bits_are_rounded_to_once(name):
    big = ModelConfig(vocab_size=4096, hidden_size=256, intermediate_size=2, num_hidden_layers=1, num_attention_heads=2)
    drawn = [init_parameter(big, "lm_head.weight", 2, None, dtype) for dtype in (np.float64, FORMATS[name].dtype)]
    assert drawn[1].dtype == FORMATS[name].dtype
    np.testing.assert_array_equal(drawn[1].astype(np.float32), round_to(drawn[0], name))


def test_the_table_has_every_parameter_once_and_in_order():
    names = list(layout(FULL))
    assert names[0] == "model.embed_tokens.weight"
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]
    layers = [row.layer for row in layout(FULL).values()]
    assert layers == ["embed"] + [0] * 16 + [1] * 16 + ["head"] * 2
    assert list(init_params(FULL)) == names == list(parameter_shapes(FULL))


def test_what_shards_a_parameter_and_where_its_gradient_is_partial():
    rows = layout(FULL)
    q, o = rows["model.layers.1.self_attn.q_proj.weight"], rows["model.layers.1.self_attn.o_proj.weight"]
    assert (dict(q.shards), dict(o.shards)) == ({"tp": 0, "fsdp": 0}, {"tp": 1, "fsdp": 0})
    assert "tp" not in q.partial | o.partial
    for name in ("model.layers.1.self_attn.o_proj.bias", "model.layers.1.input_layernorm.weight", "model.norm.weight"):
        assert "tp" not in rows[name].shards
        assert "tp" in rows[name].partial
        assert "tp" not in layout(FULL, sequence_parallel=False)[name].partial
    assert all(row.partial >= {"dp", "fsdp", "cp"} for row in rows.values())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: p.pop("lm_head.weight"), r"missing \['lm_head.weight'\]"),
        (lambda p: p.update(other=np.zeros(3)), r"not expected \['other'\]"),
        (
            lambda p: p.update({"model.norm.weight": np.ones(7)}),
            r"model.norm.weight: found shape \(7,\), expected \(24,\)",
        ),
        (lambda p: p.update({"model.norm.weight": np.ones(24, np.float32)}), "mixed number formats: float32, float64"),
    ],
)
def test_parameters_that_do_not_fit(spoil, message):
    config, params = model()
    check_params(config, params)
    spoil(params)
    with pytest.raises(ConfigError, match=message):
        check_params(config, params)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda ids, labels: (ids.astype(float), labels), "input_ids: found float64, expected an array of integers"),
        (lambda ids, labels: (ids.tolist(), labels), "input_ids: found list, expected an array of integers"),
        (lambda ids, labels: (ids, labels.astype(bool)), "labels: found bool"),
        (lambda ids, labels: (ids[0], labels[0]), r"input_ids: found shape \(13,\), expected \[batch, sequence\]"),
        (lambda ids, labels: (ids, labels[:, 1:]), r"labels: found shape \(5, 12\), expected that of input_ids"),
        (lambda ids, labels: (ids + 37, labels), "input_ids: found .*, expected 0 to 36"),
        (lambda ids, labels: (ids - 37, labels), "input_ids: found -.*, expected 0 to 36"),
        (lambda ids, labels: (ids, np.where(labels >= 0, labels, -1)), "labels: found -1, expected 0 to 36 or -100"),
        (lambda ids, labels: (ids, labels + 37), "labels: found .*, expected 0 to 36 or -100"),
        (lambda ids, labels: (ids, np.full_like(labels, -100)), "labels: all 65 are -100"),
        (lambda ids, labels: (ids[:0], labels[:0]), "labels: all 0 are -100"),
    ],
)
def test_batches_that_cannot_be_used(spoil, message):
    config = ModelConfig(**SMALL)
    ids, labels = batch(config)
    assert check_batch(config, ids, labels) == np.count_nonzero(labels >= 0) < labels.size
    with pytest.raises(ConfigError, match=message):
        check_batch(config, *spoil(ids, labels))


def test_segments_have_to_fit_too():
    config = ModelConfig(**SMALL)
    ids, labels = batch(config)
    with pytest.raises(ConfigError, match="segment_ids: found shape"):
        check_batch(config, ids, labels, np.zeros((5, 12), int))


@pytest.mark.parametrize("place", [0, 1])
def test_a_token_of_the_vocabularys_size_is_one_too_many(place):
    config, _ = model()
    tokens = batch(config, 2, 4)
    tokens[place][0, 0] = config.vocab_size
    with pytest.raises(ConfigError, match=f"found {config.vocab_size}"):
        check_batch(config, *tokens)
