"""Bytes, memory and overlap of data parallelism, sharded or not, from what really ran, against the closed formulas."""

from __future__ import annotations

import collections
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import batch, model

import refdist as rd
from refdist.device.events import Kernel, Phase
from refdist.model.layout import layout

SCALARS = {"world", "fsdp×dp"}  # the axes of token counts, losses and norms
BIG = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8}


def elements(config, piece=None):
    return sum(math.prod(row.shape) for row in layout(config).values() if piece in (None, row.layer))


def one_step(plan, config, params, precision="fp64", **world):
    """Bytes sent by all ranks together in the second step, by (axis, operation), scalars apart; and every rank's device."""
    ids, labels = batch(config, 13, 7)

    def program(comm):
        device = rd.Device()
        trainer = rd.Trainer(config, plan, comm, params=params, precision=precision, device=device)
        trainer.step(ids, labels)
        before = {row[:2]: row.bytes for row in device.traffic}
        trainer.step(ids, labels)
        return {row[:2]: row.bytes - before.get(row[:2], 0) for row in device.traffic}, device, trainer

    sent, scalars = collections.Counter(), 0
    results = rd.run(program, plan.world_size, **world)
    for rows, _, _ in results:
        for (axis, operation), nbytes in rows.items():
            if axis in SCALARS:
                scalars += nbytes
            elif nbytes:
                sent[axis, operation] += nbytes
    return dict(sent), scalars, results


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_bytes_are_those_of_the_formulas(data):
    config, params = model(hidden_size=data.draw(st.integers(4, 9)), vocab_size=data.draw(st.sampled_from([11, 37])), seed=1,
                           tie_word_embeddings=data.draw(st.booleans()), attention_bias=data.draw(st.booleans()))
    m, n, replicas = (data.draw(st.integers(1, 3)) for _ in range(3))
    zero = data.draw(st.sampled_from([1, 2, 3]))
    keep = data.draw(st.sampled_from([(True, True), (False, True), (False, False)]))
    plan = rd.Plan(dp=replicas, fsdp=n, zero=zero, micro_batches=m, reshard_after_forward=keep[0], reshard_after_backward=keep[1])
    sent, scalars, _ = one_step(plan, config, params)

    whole = 8 * elements(config)
    blocks = 8 * sum(elements(config, layer) for layer in range(config.num_hidden_layers))
    again = 8 * config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0  # embedding, then head
    gathers = {1: whole, 2: whole, 3: {(True, True): m * (whole + blocks + again), (False, True): m * whole,
                                       (False, False): whole}[keep]}[zero]
    scatters = {1: whole, 2: m * whole, 3: m * whole}[zero]
    want = {("fsdp", "all_gather"): replicas * (n - 1) * gathers, ("fsdp", "reduce_scatter"): replicas * (n - 1) * scatters,
            ("dp", "all_reduce"): 2 * (replicas - 1) * whole}
    assert sent == {key: value for key, value in want.items() if value}
    assert scalars <= plan.world_size**2 * 2 * 70 * 8


@pytest.mark.parametrize("zero", [2, 3])
def test_bytes_in_rank_order(zero):
    config, params = model(tie_word_embeddings=True)
    sent, _, _ = one_step(rd.Plan(fsdp=3, zero=zero, micro_batches=2, order="rank"), config, params)
    tied = config.vocab_size * config.hidden_size  # travels once for each of its uses
    assert sent["fsdp", "all_to_all"] == 8 * 2 * 2 * (elements(config) + tied)
    assert ("fsdp", "reduce_scatter") not in sent


def rows_of(config, n, rank):
    """Elements that one of n ranks owns."""
    return sum(len(np.array_split(np.arange(row.shape[0]), n)[rank]) * math.prod(row.shape[1:])
               for row in layout(config).values())


@pytest.mark.parametrize(("precision", "sizes"), [("fp16", (2, 2, 4, 8)), ("fp32", (4, 4, 0, 8)), ("fp64", (8, 8, 0, 16))])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_training_state_is_that_of_the_zero_paper(n, precision, sizes):
    """Bytes of a parameter, its gradient, its master copy and its two moments; each category whole, or by rows, on every rank.

    With fp16 that is 16 Ψ; 4 Ψ + 12 Ψ/N under ZeRO 1; 2 Ψ + 14 Ψ/N under ZeRO 2; 16 Ψ/N under ZeRO 3.
    """
    config, params = model()
    psi = elements(config)
    paper = {0: 16 * psi, 1: 4 * psi + 12 * psi / n, 2: 2 * psi + 14 * psi / n, 3: 16 * psi / n}
    row_each = sum(math.prod(row.shape[1:]) for row in layout(config).values())
    for zero in (0, 1, 2, 3):
        plan = rd.Plan(dp=n) if zero == 0 else rd.Plan(fsdp=n, zero=zero)
        _, _, results = one_step(plan, config, params, precision)
        for rank, (_, device, _) in enumerate(results):
            own = rows_of(config, n, rank)
            assert abs(own - psi / n) <= row_each, "to within a row each"
            cut_from = {"parameter": 3, "gradient": 2, "master": 1, "optimizer": 1}
            want = {category: size * (own if zero >= stage else psi)
                    for (category, stage), size in zip(cut_from.items(), sizes, strict=True) if size}
            alive = {category: size for category, size in device.live.items() if size and category != "total"}
            assert alive == want, f"ZeRO {zero}, rank {rank}"
            assert device.live["total"] == sum(want.values())
            if precision == "fp16":
                assert abs(device.live["total"] - paper[zero]) <= 16 * row_each * (zero > 0)


@pytest.mark.parametrize("tied", [False, True])
def test_at_most_two_layers_are_gathered_at_once(tied):
    config, params = model(**BIG, tie_word_embeddings=tied)
    head = elements(config, "head") + (elements(config, "embed") if tied else 0)
    sizes = [elements(config, "embed"), *(elements(config, layer) for layer in range(4)), head]
    pairs = [a + b for a, b in pairwise(sizes)]
    for prefetch, most in ((True, max(pairs)), (False, max(sizes))):
        _, _, results = one_step(rd.Plan(fsdp=3, prefetch=prefetch, micro_batches=2), config, params)
        assert {device.peak["gathered"] for _, device, _ in results} == {8 * most}
    _, _, results = one_step(rd.Plan(fsdp=3, reshard_after_forward=False), config, params)
    assert {device.peak["gathered"] for _, device, _ in results} == {8 * elements(config)}


def test_whole_gradients_live_for_two_layers_only():
    """Also on a rank that is far ahead of the others, so that its reductions do not end by themselves."""
    config, params = model(**BIG)
    layer = max(elements(config, piece) for piece in range(4))
    ahead = lambda runnable: runnable.index(min(runnable))  # noqa: E731
    _, _, results = one_step(rd.Plan(fsdp=3, zero=2, micro_batches=2), config, params, scheduler=ahead)
    for rank, (_, device, _) in enumerate(results):
        assert device.peak["gradient"] <= 8 * (rows_of(config, 3, rank) + 2 * layer)


def overlapped(events):
    """Phase name -> kernels that ran between its beginning and its end."""
    running, found = {}, {}
    for event in events:
        if isinstance(event, Kernel):
            for name in running:
                running[name] += 1
        elif isinstance(event, Phase) and event.name.startswith(("all-reduce", "reduce-scatter", "gather")):
            if event.begins:
                running[event.name] = 0
            else:
                found.setdefault(event.name, []).append(running.pop(event.name))
    return found


def test_kernels_run_between_start_and_end_of_reductions_and_prefetches():
    """With rendezvous sends: a rank that comes last finds buffered messages waiting, and needs no time."""
    config, params = model(**BIG)
    ids, labels = batch(config, 6, 7)

    def traced(plan):
        def program(comm):
            events = []
            trainer = rd.Trainer(config, plan, comm, params=params, precision="fp64", device=rd.Device(listeners=[events.append]))
            trainer.step(ids, labels)
            return overlapped(events)
        return rd.run(program, plan.world_size, sends="rendezvous")

    for found in traced(rd.Plan(dp=3, bucket_bytes=1)):
        assert set(found) == {f"all-reduce of {piece}" for piece in ("head", 3, 2, 1, 0, "embed")}
        assert all(found[f"all-reduce of {piece}"][0] > 0 for piece in ("head", 3, 2, 1, 0))
    for found in traced(rd.Plan(fsdp=3)):
        for layer in range(1, 4):
            assert len(found[f"gather of {layer}"]) == 2, "forward and backward"
            assert all(count > 0 for count in found[f"gather of {layer}"]), "prefetched in both"
            assert found[f"reduce-scatter of {layer}"][0] > 0
    for found in traced(rd.Plan(fsdp=3, prefetch=False)):
        assert not any(sum(counts) for name, counts in found.items() if name.startswith("gather"))
