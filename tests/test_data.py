"""The corpus, its windows, and the bigram baseline."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from refdist.train.bigram import bigram_log_probabilities, bigram_loss
from refdist.train.data import (
    STANDARD_LIBRARY_LIMIT,
    DataError,
    _standard_library,
    evaluation_windows,
    is_validation,
    load_corpus,
    split_by_blocks,
    split_windows,
    training_windows,
)


def random_text(length: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(1, 256, length, dtype=np.uint8).tobytes()


def write_folder(folder: Path, names: list[str]) -> None:
    for i, name in enumerate(names):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(random_text(200 + i, seed=i))


NAMES = [f"{a}/{b}.txt" for a in "zyxabc" for b in range(7)]


def test_default_corpus_is_some_megabytes_of_python() -> None:
    corpus = load_corpus(seq=128)
    assert 1_000_000 < len(corpus.train) + len(corpus.validation) <= STANDARD_LIBRARY_LIMIT * 1.01
    assert 0.03 < len(corpus.validation) / len(corpus.train) < 0.3
    assert b"import " in corpus.train.tobytes()
    assert b"import " in corpus.validation.tobytes()
    assert load_corpus(seq=128).checksum() == corpus.checksum()


def test_each_file_of_a_folder_is_in_one_split_by_its_path(tmp_path: Path) -> None:
    write_folder(tmp_path, NAMES)
    corpus = load_corpus([tmp_path], seq=16)
    held_back = [name for name in NAMES if is_validation(name)]
    assert held_back
    assert len(held_back) < len(NAMES) / 2
    for name in NAMES:
        text = (tmp_path / name).read_bytes()
        assert (text in corpus.validation.tobytes()) == (name in held_back)
        assert (text in corpus.train.tobytes()) == (name not in held_back)


def test_the_order_of_a_listing_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path, NAMES)
    before = load_corpus([tmp_path], seq=16).checksum()
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda self: sorted(listed(self), reverse=True))
    assert load_corpus([tmp_path], seq=16).checksum() == before


def test_the_split_does_not_depend_on_where_a_folder_lies(tmp_path: Path) -> None:
    write_folder(tmp_path / "here", NAMES)
    write_folder(tmp_path / "there" / "deeper", NAMES)
    here, there = load_corpus([tmp_path / "here"]), load_corpus([tmp_path / "there" / "deeper"])
    assert here.checksum() == there.checksum()


@pytest.mark.parametrize("length", [34, 35, 50, 170, 1_000, 700_001, 3_000_000])
def test_one_file_is_split_by_blocks(length: int) -> None:
    text = random_text(length)
    corpus = split_by_blocks(text, seq=16, origin="text")
    assert len(corpus.train) + len(corpus.validation) == length
    assert min(len(corpus.train), len(corpus.validation)) >= 17
    if length >= 170:
        assert 0.09 < len(corpus.validation) / length < 0.11
    start = text.index(corpus.validation.tobytes()[:17])
    assert start > 0  # the text opens with training data


def test_few_files_are_split_by_blocks(tmp_path: Path) -> None:
    write_folder(tmp_path, ["a", "b"])
    corpus = load_corpus([tmp_path / "a", tmp_path / "b"], seq=16)
    assert min(len(corpus.train), len(corpus.validation)) >= 17


def test_pictures_and_binary_files_of_a_folder_are_left_out(tmp_path: Path) -> None:
    for name, content in (("a.txt", b"words "), ("b.svg", b"<svg/>"), ("c.bin", b"\0\1"), ("d.md", b"more\n")):
        (tmp_path / name).write_bytes(content * 99)
    corpus = load_corpus([tmp_path], 8)
    text = np.concatenate([corpus.train, corpus.validation]).tobytes()
    assert text.count(b"words ") + text.count(b"more\n") >= 196  # a block may cut one
    assert b"svg" not in text
    assert b"\1" not in text
    named = load_corpus([tmp_path / "b.svg"], 8)
    assert b"<svg/>" in named.train.tobytes()


def test_bad_texts_are_refused_in_one_line(tmp_path: Path) -> None:
    empty, short = tmp_path / "empty", tmp_path / "short"
    empty.write_bytes(b"")
    short.write_bytes(b"x" * 33)
    (tmp_path / "folder").mkdir()
    for paths, words in [
        ([tmp_path / "none"], "cannot read .*none"),
        ([empty], "no text in .*empty"),
        ([tmp_path / "folder"], "no text in .*folder"),
        ([short], r"short has 33 bytes, too short: --seq 16 needs 34"),
    ]:
        with pytest.raises(DataError, match=words) as caught:
            load_corpus(paths, seq=16)
        assert "\n" not in str(caught.value)


def test_an_unreadable_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"cannot read .*: Permission denied"):
        load_corpus([tmp_path])


def test_windows_follow_from_seed_and_step_alone() -> None:
    text = np.frombuffer(random_text(5000), np.uint8)
    first = training_windows(text, 6, 32, seed=3, step=10)
    assert first.shape == (6, 33)
    assert np.array_equal(first, training_windows(text, 6, 32, seed=3, step=10))
    assert np.array_equal(first[:4], training_windows(text, 4, 32, seed=3, step=10))
    for seed, step in [(4, 10), (3, 11), (-1, 10)]:
        assert not np.array_equal(first, training_windows(text, 6, 32, seed=seed, step=step))
    assert all(row.tobytes() in text.tobytes() for row in first)


def test_windows_reach_both_ends_of_the_text() -> None:
    text = np.arange(20, dtype=np.uint8)
    windows = np.concatenate([training_windows(text, 8, 4, seed=0, step=step) for step in range(50)])
    assert set(windows[:, 0]) == set(range(16))
    assert windows[:, -1].max() == 19


def test_labels_are_the_next_bytes() -> None:
    windows = np.arange(22, dtype=np.uint8).reshape(2, 11)
    input_ids, labels = split_windows(windows)
    assert input_ids.dtype == labels.dtype == np.int64
    assert np.array_equal(labels, input_ids + 1)
    assert input_ids[1, 0] == 11


def test_evaluation_windows_cover_the_text_once() -> None:
    text = np.arange(101, dtype=np.uint8)
    windows = evaluation_windows(text, 10, at_most=1000)
    assert np.array_equal(windows[:, 1:].ravel(), text[1:])
    spread = evaluation_windows(text, 10, at_most=4)
    assert len(spread) == 4
    assert len(set(spread[:, 0])) == 4
    assert evaluation_windows(text[:11], 10, at_most=4).shape == (1, 11)


def test_bigram_is_a_distribution_and_learns_pairs() -> None:
    text = np.frombuffer(b"abababababcb" * 50, np.uint8)
    log_p = bigram_log_probabilities(text)
    assert np.allclose(np.exp(log_p).sum(axis=1), 1, atol=1e-12)
    assert log_p[ord("a"), ord("b")] > -0.2
    assert np.isfinite(log_p).all()


def test_bigram_smoothing_equals_the_formula() -> None:
    text = np.frombuffer(b"aab", np.uint8)
    a, b = ord("a"), ord("b")
    log_p = bigram_log_probabilities(text, strength=2.0)
    assert np.isclose(np.exp(log_p[a, b]), (1 + 2.0 * 2 / 259) / (2 + 2.0), rtol=1e-12)
    windows = np.array([[a, a, b]], dtype=np.uint8)
    assert np.isclose(bigram_loss(log_p, windows), -(log_p[a, a] + log_p[a, b]) / 2, rtol=1e-12)


def test_bigram_loss_of_uniform_text_is_its_entropy() -> None:
    text = np.frombuffer(random_text(400_000), np.uint8)
    loss = bigram_loss(bigram_log_probabilities(text), evaluation_windows(text, 64, 100))
    assert abs(loss - np.log(255)) < 0.2


def test_both_parts_have_a_whole_window(tmp_path: Path) -> None:
    """The held-back file with its end mark is one byte too short for a window: the text is split by blocks."""
    names = [f"f{number}" for number in range(100)]
    held_back = next(name for name in names if is_validation(name))
    other = next(name for name in names if not is_validation(name))
    (tmp_path / held_back).write_bytes(b"x" * 9)
    (tmp_path / other).write_bytes(b"y" * 90)
    corpus = load_corpus([tmp_path], seq=10)
    assert min(len(corpus.train), len(corpus.validation)) >= 11


def test_a_zero_byte_far_from_the_beginning_makes_no_text(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"a" * 8191 + b"\0" + b"a" * 100)
    (tmp_path / "text").write_bytes(b"b" * 100)
    corpus = load_corpus([tmp_path], seq=1)
    assert ord("a") not in corpus.train


def test_the_standard_library_stays_below_its_limit() -> None:
    assert sum(path.stat().st_size for _, path in _standard_library()) <= STANDARD_LIBRARY_LIMIT
