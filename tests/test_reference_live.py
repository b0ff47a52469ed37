"""The reference against transformers' LlamaForCausalLM on random configurations, where torch is installed."""

import numpy as np
import pytest
from hypothesis import given, settings
from models import batch, configurations, model, segments_of

from refdist.model import reference

pytest.importorskip("torch")
pytest.importorskip("transformers")


@settings(deadline=None, max_examples=60)
@given(configurations())
def test_loss_and_gradients_are_those_of_transformers(case):
    import hugging_face

    options, shape, seed, segmented = case
    config, params = model(seed, **options)
    ids, labels = batch(config, **shape, seed=seed)
    labels[0, 0] = 1  # one label at least
    segments = segments_of(ids, seed) if segmented else None
    want_loss, want = hugging_face.loss_and_grads(config, params, ids, labels, segments)
    loss, grads = reference.loss_and_grads(config, params, ids, labels, segment_ids=segments)
    assert loss == pytest.approx(want_loss, rel=1e-11, abs=1e-12)
    assert grads.keys() == want.keys()
    floor = 1e-3 * max(np.abs(g).max() for g in want.values())
    for name, grad in grads.items():
        assert np.abs(grad - want[name]).max() <= 1e-10 * max(np.abs(want[name]).max(), floor), name
