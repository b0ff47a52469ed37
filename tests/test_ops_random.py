"""Counter-based random numbers: known answers, and a part of an array equals the part of the whole."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refdist.numerics import random as module
from refdist.numerics.random import keep_mask, normal, philox, random_words, stream

KNOWN = [  # Random123's kat_vectors for philox4x32-10: counter, key, words
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words):
    got = philox([np.array([word], np.uint64) for word in counter], key)
    assert tuple(int(word[0]) for word in got) == words


@st.composite
def boxes(draw):
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    box = []
    for size in shape:
        start, stop = sorted((draw(st.integers(0, size)), draw(st.integers(0, size))))
        part = slice(start, stop)
        if draw(st.booleans()):
            part = np.array(draw(st.lists(st.integers(0, size - 1), max_size=5)), dtype=int)
        box.append(part)
    return tuple(shape), box, draw(st.sampled_from([3, 8, 32768]))


@settings(deadline=None, max_examples=300)
@given(boxes())
def test_a_part_is_the_part_of_the_whole(case):
    shape, box, chunk = case
    identity = stream(7, "x")
    with pytest.MonkeyPatch.context() as patch:
        whole = [f(identity, shape) for f in (random_words, normal)]
        patch.setattr(module, "CHUNK", chunk)
        parts = [f(identity, shape, box) for f in (random_words, normal)]
    index = np.ix_(*(np.arange(n)[part] for n, part in zip(shape, box, strict=True)))
    for all_numbers, part in zip(whole, parts, strict=True):
        assert np.array_equal(part, all_numbers[index])


def test_streams_differ_and_do_not_repeat():
    words = [random_words(stream(seed, name, i), (1000,)) for seed in (0, 1) for name in ("a", "b") for i in (0, 1)]
    assert len(np.unique(np.concatenate(words))) > 7990
    assert np.array_equal(random_words(stream(0, "a", 0), (1000,)), words[0])


def test_normal_has_the_moments_of_a_normal():
    x = normal(stream(0, "moments"), (400, 1000), std=3.0) / 3
    assert abs(x.mean()) < 5 / np.sqrt(x.size)
    assert abs(x.var() - 1) < 5 * np.sqrt(2 / x.size)
    assert abs((x**3).mean()) < 5 * np.sqrt(15 / x.size)
    assert abs((x**4).mean() - 3) < 5 * np.sqrt(96 / x.size)
    neighbours = x.reshape(-1, 4)
    assert np.abs(np.corrcoef(neighbours.T) - np.eye(4)).max() < 5 / np.sqrt(len(neighbours))


def test_keep_mask_keeps_with_the_right_probability():
    assert keep_mask(stream(0, "m"), (1000, 300), None, 0.3).mean() == pytest.approx(0.7, abs=5e-3)
    assert keep_mask(stream(0, "m"), (1000,), None, 0.0).all()


def test_keep_mask_again_is_that_of_the_same_place_only():
    """Small draws are remembered by all that they depend on: parts of one array whose indices have the same bytes, for one."""
    whole = random_words(stream(0, "m"), (6, 8))
    boxes = [(np.array([1, 0], np.int32), np.array([3])), (np.array([1]), np.array([3])), (slice(0, 2), slice(3, 5)),
             (slice(3, 5), slice(0, 2)), (slice(None), slice(None)), None, (np.array([1]), slice(3, 4))]
    for _ in range(2):
        for box in boxes:
            rows, columns = box or (slice(None), slice(None))
            part = whole[rows][:, columns]
            for drop in (0.25, 0.75):
                np.testing.assert_array_equal(keep_mask(stream(0, "m"), (6, 8), box, drop), part >= np.uint32(drop * 2**32))
    for other in (keep_mask(stream(1, "m"), (6, 8), None, 0.5), keep_mask(stream(0, "n"), (6, 8), None, 0.5),
                  keep_mask(stream(0, "m"), (8, 6), None, 0.5).reshape(-1)[:48].reshape(6, 8)[:, ::-1]):
        assert (other != (whole >= 1 << 31)).any()
    mask = keep_mask(stream(0, "m"), (6, 8), None, 0.5)
    mask[...] = False  # belongs to the caller
    np.testing.assert_array_equal(keep_mask(stream(0, "m"), (6, 8), None, 0.5), whole >= 1 << 31)
    np.testing.assert_array_equal(keep_mask(stream(0, "m"), (9, 8), (slice(0, 6), slice(None)), 0.5), whole >= 1 << 31)
    for seed in range(600):
        keep_mask(stream(seed, "many"), (3,), None, 0.5)
    keep_mask(stream(0, "large"), (module.SMALL + 1,), None, 0.5)
    assert len(module._remembered) <= module.REMEMBERED
    assert sum(words.size for words in module._remembered.values()) <= module.REMEMBERED * module.SMALL
    assert max(words.size for words in module._remembered.values()) <= module.SMALL
