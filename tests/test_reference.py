"""The oracle against PyTorch's autograd (golden files) and against finite differences."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from models import batch, configurations, model, segments_of
from safetensors import safe_open

from refdist.errors import ConfigError
from refdist.model import ModelConfig, reference

HERE = Path(__file__).parent
GOLDEN = sorted([*HERE.glob("golden/*.safetensors"), *HERE.parent.parent.glob("shared/golden/*.safetensors")])
VARIANTS = {
    "plain": {},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "multi-query": {"num_key_value_heads": 1},
    "multi-head": {"num_key_value_heads": 6},
}


def worst(grads, want):
    """The largest error over max(the gradient's own largest element, a thousandth of the largest of all)."""
    assert list(grads) == list(want) or set(grads) == set(want)
    floor = 1e-3 * max(np.abs(g).max() for g in want.values())
    return max(np.abs(grads[k] - want[k]).max() / max(np.abs(want[k]).max(), floor) for k in want)


def test_there_are_golden_files():
    assert len(list(HERE.glob("golden/*.safetensors"))) == 3


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_golden_files(path):
    with safe_open(str(path), "np") as file:
        config = ModelConfig.from_dict(json.loads(file.metadata()["config"]))
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    want = {key[5:]: value for key, value in tensors.items() if key.startswith("grad.")}
    params = {key: tensors[key] for key in want}
    ids, labels, segments = tensors["input_ids"], tensors["labels"], tensors.get("segment_ids")
    loss, grads = reference.loss_and_grads(config, params, ids, labels, segment_ids=segments)
    assert abs(loss - tensors["loss"][0]) < 1e-10
    assert worst(grads, want) < 1e-10


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("segmented", [False, True])
def test_gradients_are_those_of_finite_differences(variant, segmented):
    config, params = model(**VARIANTS[variant])
    ids, labels = batch(config, rows=3, seq=7)
    segments = np.array([[0, 0, 1, 1, 1, 2, 2], [5] * 7, [0, 1, 2, 3, 4, 5, 6]]) if segmented else None

    def loss_of(params):
        return reference.loss_and_grads(config, params, ids, labels, segment_ids=segments)[0]

    _, grads = reference.loss_and_grads(config, params, ids, labels, segment_ids=segments)
    rng, step = np.random.default_rng(0), 1e-4
    for name, grad in grads.items():
        direction = rng.normal(size=grad.shape)
        shifted = [loss_of(params | {name: params[name] + k * step * direction}) for k in (-2, -1, 1, 2)]
        slope = (shifted[0] - 8 * shifted[1] + 8 * shifted[2] - shifted[3]) / (12 * step)
        assert np.sum(grad * direction) == pytest.approx(slope, rel=1e-7, abs=1e-9), name


def test_token_losses_and_logits_belong_to_the_loss():
    config, params = model(tie_word_embeddings=True)
    ids, labels = batch(config)
    loss, _ = reference.loss_and_grads(config, params, ids, labels)
    losses = reference.token_losses(config, params, ids, labels)
    assert losses.shape == labels.shape
    assert not losses[labels == -100].any()
    assert losses.sum() / np.count_nonzero(labels >= 0) == pytest.approx(loss, rel=1e-14)
    scores = reference.logits(config, params, ids)
    log_p = scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))
    picked = np.take_along_axis(log_p, labels.clip(0)[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(losses, np.where(labels >= 0, -picked, 0), atol=1e-12)


def test_groups_change_the_rounding_only_and_no_groups_are_one_group():
    config, params = model(tie_word_embeddings=True, attention_bias=True)
    ids, labels = batch(config)
    loss, grads = reference.loss_and_grads(config, params, ids, labels)
    same = reference.loss_and_grads(config, params, ids, labels, groups=[[[0, 1, 2, 3, 4]]])
    assert same[0] == loss
    assert all(np.array_equal(same[1][name], grads[name]) for name in grads)
    for groups in ([[[0, 1], [2]], [[3], [4]]], [[4], [], [0, 2], [3, 1]], [[[[0], []], [[1]]], [[[2]], [[3, 4]]]]):
        other_loss, other = reference.loss_and_grads(config, params, ids, labels, groups=groups)
        assert other_loss == pytest.approx(loss, rel=1e-14)
        assert worst(other, grads) < 1e-12


def test_the_two_uses_of_a_tied_matrix_are_added_together_within_a_rank():
    """Against the untied model with the same matrix twice, whose two gradients are the two uses."""
    config, params = model(dtype=np.float32, tie_word_embeddings=True)
    untied, _ = model(dtype=np.float32)
    ids, labels = batch(config)
    sums = [_row_gradient(untied, {**params, "lm_head.weight": params["model.embed_tokens.weight"]}, ids, labels, row)
            for row in range(5)]
    embed, head = ([sums[row][name] for row in range(5)] for name in ("model.embed_tokens.weight", "lm_head.weight"))
    _, grads = reference.loss_and_grads(config, params, ids, labels, groups=[[[0], [1]], [[2], [3], [4]]])
    first = (embed[0] + embed[1]) + (head[0] + head[1])
    second = ((embed[2] + embed[3]) + embed[4]) + ((head[2] + head[3]) + head[4])
    assert np.array_equal(grads["model.embed_tokens.weight"], first + second)
    apart = sum(embed[1:], embed[0]) + sum(head[1:], head[0])
    assert not np.array_equal(first + second, apart)


def test_groups_are_added_from_the_innermost_out():
    config, params = model(dtype=np.float32)
    ids, labels = batch(config)
    sums = {row: _row_gradient(config, params, ids, labels, row) for row in range(5)}
    _, grads = reference.loss_and_grads(config, params, ids, labels, groups=[[[0], [1]], [[2], [3], [4]]])
    for name, grad in grads.items():
        g = [sums[row][name] for row in range(5)]
        assert np.array_equal(grad, (g[0] + g[1]) + ((g[2] + g[3]) + g[4]))


def _row_gradient(config, params, ids, labels, row):
    """The term of one row."""
    micro = reference._Batch.of(config, params, ids, None, [row])
    return reference._loss_sum_and_grads(config, params, micro, labels[[row]], 1 / np.count_nonzero(labels >= 0))[1]


@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 1, 2, 3, 4, 4]], [[0, 1, 2, 3, 5]]])
def test_groups_have_each_row_once(groups):
    config, params = model()
    ids, labels = batch(config)
    with pytest.raises(ConfigError, match="expected each of 0 to 4 once"):
        reference.loss_and_grads(config, params, ids, labels, groups=groups)


def test_chunks_of_the_head_add_up(monkeypatch):
    config, params = model(tie_word_embeddings=True)
    ids, labels = batch(config)
    loss, grads = reference.loss_and_grads(config, params, ids, labels)
    monkeypatch.setattr(sys.modules["refdist.ops.cross_entropy"], "LOGITS", 7 * 37)
    chunked_loss, chunked = reference.loss_and_grads(config, params, ids, labels)
    assert chunked_loss == pytest.approx(loss, rel=1e-14)
    assert worst(chunked, grads) < 1e-12


def test_segments_are_as_separate_rows():
    config, params = model()
    ids, labels = batch(config, rows=1, seq=12)
    segments = np.array([[0] * 5 + [1] * 7])
    packed = reference.token_losses(config, params, ids, labels, segment_ids=segments)
    apart = [reference.token_losses(config, params, ids[:, part], labels[:, part]) for part in (slice(0, 5), slice(5, 12))]
    np.testing.assert_allclose(packed, np.concatenate(apart, axis=1), atol=1e-12)


def test_gradients_of_any_weighting_of_the_tokens():
    config, params = model(tie_word_embeddings=True)
    ids, labels = batch(config)
    loss, grads = reference.loss_and_grads(config, params, ids, labels)
    weights = np.full(labels.shape, 1 / np.count_nonzero(labels >= 0))
    same_loss, same = reference.weighted_loss_and_grads(config, params, ids, labels, weights)
    assert same_loss == pytest.approx(loss, rel=1e-14)
    assert worst(same, grads) < 1e-13
    rng = np.random.default_rng(1)
    parts = rng.normal(size=(2, *labels.shape))
    results = [reference.weighted_loss_and_grads(config, params, ids, labels, w) for w in (*parts, parts.sum(axis=0))]
    assert results[0][0] == pytest.approx(np.sum(parts[0] * reference.token_losses(config, params, ids, labels)))
    assert worst({k: results[0][1][k] + results[1][1][k] for k in grads}, results[2][1]) < 1e-12
    with pytest.raises(ConfigError, match="weights: found shape"):
        reference.weighted_loss_and_grads(config, params, ids, labels, weights[0])


def test_a_tokens_gradient_reaches_only_what_it_saw():
    config, params = model()
    ids, labels = batch(config, rows=1, seq=6, ignored=0)
    weights = np.eye(6)[[2]]
    _, grads = reference.weighted_loss_and_grads(config, params, ids, labels, weights)
    unseen = set(range(37)) - set(ids[0, :3].tolist())
    assert not grads["model.embed_tokens.weight"][sorted(unseen)].any()
    assert all(grads["model.embed_tokens.weight"][token].any() for token in ids[0, :3])


@pytest.mark.parametrize("clip_norm", [None, 1e-3, 1e3])
def test_training_steps_are_the_written_out_arithmetic(clip_norm):
    config, params = model()
    batches = [batch(config, seed=seed) for seed in range(3)]
    kept = {name: p.copy() for name, p in params.items()}
    trained = reference.train(config, params, batches, reference.sgd(0.1), clip_norm=clip_norm)
    want = kept
    for step, (ids, labels) in enumerate(batches):
        loss, grads = reference.loss_and_grads(config, want, ids, labels)
        norm = np.sqrt(sum(np.sum(g**2) for g in grads.values()))
        scale = clip_norm / norm if clip_norm is not None and norm > clip_norm else 1
        want = {name: want[name] - 0.1 * scale * grads[name] for name in want}
        assert (trained.losses[step], trained.norms[step]) == pytest.approx((loss, norm), rel=1e-12)
    assert worst(trained.params, want) < 1e-13
    assert all(np.array_equal(params[name], kept[name]) for name in kept)


def test_first_adamw_step_has_the_size_of_the_learning_rate():
    config, params = model()
    trained = reference.train(config, params, [batch(config)], reference.adamw(0.01, eps=1e-30, weight_decay=0.5))
    _, grads = reference.loss_and_grads(config, params, *batch(config))
    for name, p in params.items():
        decay = 0.5 if p.ndim == 2 else 0.0
        step = np.where(grads[name] != 0, np.sign(grads[name]), 0) + decay * p
        np.testing.assert_allclose(trained.params[name], p - 0.01 * step, atol=1e-12)
        assert len(trained.state[name]) == 2


def test_momentum_remembers():
    update = reference.sgd(1.0, momentum=0.5)
    p, state = update(np.zeros((1, 1)), np.ones((1, 1)), (), 1)
    assert (p.item(), state[0].item()) == (-1, 1)
    p, state = update(p, np.ones((1, 1)), state, 2)
    assert (p.item(), state[0].item()) == (-2.5, 1.5)
    p, _ = reference.sgd(1.0, momentum=0.5, nesterov=True)(p, np.ones((1, 1)), state, 3)
    assert p.item() == -2.5 - (1 + 0.5 * (0.5 * 1.5 + 1))


@settings(deadline=None, max_examples=40)
@given(configurations())
def test_any_configuration_has_the_slope_of_finite_differences(case):
    options, shape, seed, segmented = case
    config, params = model(seed, **options)
    ids, labels = batch(config, **shape, seed=seed)
    labels[0, 0] = 1
    segments = segments_of(ids, seed) if segmented else None
    rng = np.random.default_rng(seed)
    direction = {name: rng.normal(size=p.shape) for name, p in params.items()}

    def loss_at(step):
        moved = {name: p + step * direction[name] for name, p in params.items()}
        return reference.loss_and_grads(config, moved, ids, labels, segment_ids=segments)[0]

    _, grads = reference.loss_and_grads(config, params, ids, labels, segment_ids=segments)
    step, slope = 1e-5, sum(np.sum(grads[name] * direction[name]) for name in grads)
    numeric = (loss_at(-2 * step) - 8 * loss_at(-step) + 8 * loss_at(step) - loss_at(2 * step)) / (12 * step)
    assert slope == pytest.approx(numeric, rel=1e-5, abs=1e-7)


def test_formats_of_16_bits_are_refused():
    """Its rotary tables and norms would have 16 bits too: no oracle."""
    config, params = model()
    ids, labels = batch(config, 2, 4)
    half = {name: value.astype(np.float16) for name, value in params.items()}
    for call in (lambda: reference.loss_and_grads(config, half, ids, labels),
                 lambda: reference.token_losses(config, half, ids, labels), lambda: reference.logits(config, half, ids)):
        with pytest.raises(ConfigError, match="parameters are float16: the reference computes in float32 or float64"):
            call()
