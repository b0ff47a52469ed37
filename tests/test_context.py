"""Context parallelism: every way to attend gives a single device's attention, with the bytes and the balance of the formulas."""

import itertools
import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from models import batch, model, segments_of

import refdist as rd
from refdist import ops
from refdist.cli.main import main
from refdist.device import Device
from refdist.device.events import Kernel
from refdist.model.dropout import Dropout
from refdist.model.seams import LocalAttention
from refdist.parallel.context import Chunks, all_gather, positions, ring, ulysses
from refdist.parallel.context.exchange import exchange, start_hop
from refdist.parallel.context.tracing import trace
from refdist.testing.compare import require_equal

WAYS = ["ring", "all_gather", "ulysses", "ring of pairs", "all_gather of pairs"]


def make(way, comm, device, length, layout, segments, heads, kv_heads):
    """The attention of one rank, and its positions."""
    within = comm.size if way == "ulysses" else 2 if "pairs" in way else 1
    where = positions(length, comm.size, layout, within)
    chunks = Chunks.of(where, segments)
    groups = chunks.grouped(within)
    between = comm.split(comm.rank % within)
    inner = LocalAttention(device, groups.mask(0))
    if between.size > 1:
        inner = {"ring": ring, "all_gather": all_gather}[way.split()[0]].Attention(between, device, groups)
    if within > 1:
        first = between.rank * within
        members = comm.split(comm.rank // within)
        inner = ulysses.Attention(members, device, chunks.lengths[first:first + within], heads, kv_heads, inner)
    return inner, where[comm.rank]


def compare(way, ranks, layout, length=29, heads=8, kv_heads=2, dtype=np.float64, segmented=False, dropped=False, seed=0):
    """(results of the ranks put together, those of one device), each [out, dq, dk, dv]."""
    rng = np.random.default_rng(seed)
    q, dout = (rng.standard_normal((2, length, heads, 6)).astype(dtype) for _ in range(2))
    k, v = (rng.standard_normal((2, length, kv_heads, 6)).astype(dtype) for _ in range(2))
    segments = segments_of(np.zeros((2, length), int), seed) if segmented else None
    config = rd.ModelConfig(9, 9, 9, 1, heads, kv_heads, head_dim=6, attention_dropout=0.3)
    dropout = Dropout(config, 7, np.arange(2), length, np.arange(length)).attention(0) if dropped else None
    everywhere = np.arange(length)
    local = LocalAttention(Device(), ops.AttentionMask(everywhere, everywhere, segments, segments))
    out, saved = local.forward(q, k, v, dropout)
    single = [out, *local.backward(dout, saved, dropout)]

    def program(comm):
        attention, own = make(way, comm, Device(), length, layout, segments, heads, kv_heads)
        result, kept = attention.forward(*(np.ascontiguousarray(x[:, own]) for x in (q, k, v)), dropout)
        again, kept = attention.again(kept._replace(out=None, lse=None), dropout)
        assert np.array_equal(result, again)
        return own, [result, *attention.backward(np.ascontiguousarray(dout[:, own]), kept, dropout)]

    joined = [np.empty_like(x) for x in single]
    for own, parts in rd.run(program, ranks=ranks, checks=True, scheduler=seed):
        for whole, part in zip(joined, parts, strict=True):
            whole[:, own] = part
    return joined, single


def largest(got, wanted):
    """The largest difference, each array's over its own scale (with one key the gradients of q and k are 0)."""
    scales = [float(np.max(np.abs(b))) for b in wanted]
    least = 1e-3 * max(scales)
    return max(float(np.max(np.abs(a.astype(np.float64) - b))) / max(scale, least)
               for a, b, scale in zip(got, wanted, scales, strict=True))


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize(("way", "ranks"), [
    *((way, ranks) for way in ("ring", "all_gather") for ranks in (1, 2, 3, 4, 5, 8)),
    *(("ulysses", ranks) for ranks in (2, 4, 8)), ("ring of pairs", 4), ("ring of pairs", 6), ("all_gather of pairs", 6)])
def test_attention_is_that_of_one_device(way, ranks, layout):
    for segmented, dropped in itertools.product([False, True], repeat=2):
        got, wanted = compare(way, ranks, layout, segmented=segmented, dropped=dropped, seed=ranks)
        assert largest(got, wanted) < 1e-13


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kv_heads", [1, 4, 8])
def test_kv_heads_fewer_than_ranks_as_many_and_more(way, kv_heads):
    for length in (2, 3, 16):
        got, wanted = compare(way, 4, "zigzag", length=length, kv_heads=kv_heads)
        assert largest(got, wanted) < 1e-13


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize(("way", "ranks"), [("ring", 3), ("all_gather", 3), ("ulysses", 4), ("ring of pairs", 4),
                                            ("ring of pairs", 6), ("all_gather of pairs", 4)])
def test_every_short_length(way, ranks, layout):
    """Few positions a rank, or none: what pairs of ranks hold together is in no order then."""
    for length in range(1, 2 * ranks + 1):
        got, wanted = compare(way, ranks, layout, length=length)
        assert largest(got, wanted) < 1e-12, length


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("way", WAYS)
def test_rounding_errors_are_at_most_twice_a_single_devices(way, dtype):
    got, single = compare(way, 4, "zigzag", length=200, dtype=dtype)
    exact = single_exact(200, dtype)
    assert largest(got, exact) <= 2 * largest(single, exact)


@pytest.mark.parametrize(("way", "bound"), [("ring", 1.05), ("all_gather", 1.05), ("ring of pairs", 1.05), ("ulysses", 1.5)])
@pytest.mark.parametrize("ranks", [4, 8])
def test_partial_results_of_16_bits_are_added_up_in_32(way, bound, ranks):
    """The root mean square of the errors of out, dq, dk and dv is that of one device, rounded once, however many are merged.

    With Ulysses the terms of a shared KV head travel in 16 bits, and are rounded once more for that.
    """
    got, single = compare(way, ranks, "zigzag", length=200, dtype=np.float16)
    for mine, one, exact in zip(got, single, single_exact(200, np.float16), strict=True):
        own, other = (np.sqrt(np.mean((x.astype(np.float64) - exact)**2)) for x in (one, mine))
        assert other <= bound * own


def single_exact(length, dtype, seed=0):
    """One device in float64, on the numbers that `compare` draws in dtype."""
    rng = np.random.default_rng(seed)
    q, dout = (rng.standard_normal((2, length, 8, 6)).astype(dtype).astype(np.float64) for _ in range(2))
    k, v = (rng.standard_normal((2, length, 2, 6)).astype(dtype).astype(np.float64) for _ in range(2))
    local = LocalAttention(Device(), ops.AttentionMask(np.arange(length), np.arange(length)))
    out, saved = local.forward(q, k, v)
    return [out, *local.backward(dout, saved)]


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_the_rings_error_does_not_grow_with_the_ring(layout):
    """Sequence 4,096 in float32, root mean square of out, dq, dk and dv: as on one rank up to 8, not twice that at 32."""
    length = 4096
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, length, 1, 8)).astype(np.float32) for _ in range(4))
    local = LocalAttention(Device(), ops.AttentionMask(np.arange(length), np.arange(length)))
    out, saved = local.forward(*(x.astype(np.float64) for x in (q, k, v)))
    exact = [out, *local.backward(dout.astype(np.float64), saved)]

    def error(ranks):
        def program(comm):
            attention, own = make("ring", comm, Device(), length, layout, None, 1, 1)
            out, saved = attention.forward(*(np.ascontiguousarray(x[:, own]) for x in (q, k, v)))
            return own, [out, *attention.backward(np.ascontiguousarray(dout[:, own]), saved)]

        results = rd.run(program, ranks=ranks)
        return np.sqrt([sum(np.sum((parts[i] - exact[i][:, own])**2) for own, parts in results) for i in range(4)])

    single = error(1)
    for ranks, growth in ((3, 1.25), (8, 1.25), (32, 2)):
        assert np.all(error(ranks) < growth * single), ranks


@pytest.mark.parametrize("length", [1, 7, 16, 29])
@pytest.mark.parametrize(("ranks", "within"), [(1, 1), (3, 1), (4, 2), (6, 3), (8, 8)])
def test_each_position_has_one_owner_and_rank_i_an_early_and_a_late_chunk(length, ranks, within):
    for layout in ("zigzag", "contiguous"):
        where = positions(length, ranks, layout, within)
        assert sorted(np.concatenate(where).tolist()) == list(range(length))
        assert all(np.all(np.diff(own) > 0) for own in where)
    if length == 16 and ranks == 4:
        assert [own.tolist() for own in positions(16, 4, "zigzag")] == [
            [0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


def test_zigzag_balances_the_work_and_contiguous_does_not():
    def work(layout):
        chunks = Chunks.of(positions(64, 4, layout), None)
        return [chunks.mask(rank).visible_pairs for rank in range(4)]

    assert len(set(work("zigzag"))) == 1
    first, *_, last = work("contiguous")
    assert last == 7 * first  # 2N - 1
    assert sum(work("zigzag")) == sum(work("contiguous")) == 64**2 / 2


def test_flops_by_rank_are_those_of_the_visible_pairs():
    config, params = model()
    ids, labels = batch(config, rows=2, seq=16)

    def program(comm, layout):
        device = Device()
        rd.loss_and_grads(config, rd.Plan(cp=4, cp_layout=layout), params, ids, labels, comm=comm, device=device)
        return device.flops["model"]

    flops = {layout: rd.run(lambda comm, layout=layout: program(comm, layout), ranks=4) for layout in ("zigzag", "contiguous")}
    assert len(set(flops["zigzag"])) == 1
    assert sorted(flops["contiguous"]) == flops["contiguous"]
    assert sum(flops["zigzag"]) == sum(flops["contiguous"])
    single = Device()
    rd.run(lambda comm: rd.loss_and_grads(config, rd.Plan(), params, ids, labels, comm=comm, device=single), ranks=1)
    assert sum(flops["zigzag"]) == single.flops["model"]


def test_bytes_are_those_of_the_formulas():
    config, params = model(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4)
    rows, seq, ranks, item = 2, 16, 4, 8
    ids, labels = batch(config, rows=rows, seq=seq)
    q = rows * seq * 4 * config.head_dim * item  # bytes of q, and of k and of v, of all ranks

    def sent(method, **plan):
        def program(comm):
            device = Device()
            rd.loss_and_grads(config, rd.Plan(cp=ranks, cp_method=method, **plan), params, ids, labels, comm=comm, device=device)
            return {row.operation: row.bytes for row in device.traffic if row.axis == "cp"}
        return rd.run(program, ranks=ranks)[0]

    ring_bytes = sent("ring")
    assert ring_bytes["ring kv"] == 2 * (ranks - 1) * 2 * q // ranks  # forward and backward, N - 1 hops of k and v
    assert ring_bytes["ring dkv"] == (ranks - 1) * 2 * q // ranks
    weights = 8 * config.num_parameters() * 2 * (ranks - 1) / ranks  # the gradients' own all-reduce
    assert abs(ring_bytes["all_reduce"] - weights) <= 64
    gathered = sent("all_gather")
    assert gathered["all_gather"] == 2 * 2 * q * (ranks - 1) // ranks
    assert gathered["reduce_scatter"] == 2 * q * (ranks - 1) // ranks
    assert sent("ulysses")["all_to_all"] == 2 * 4 * q // ranks * (ranks - 1) // ranks


def test_every_movement_and_its_adjoint():
    """⟨A x, y⟩ = ⟨x, Aᵀ y⟩, summed over the ranks: K and V to whoever attends, and gradients back."""
    lengths, heads, kv_heads = [3, 2, 2, 2], 4, 2

    def program(comm):
        rng = np.random.default_rng(comm.rank)
        device, own = Device(), lengths[comm.rank]
        pairs = []
        # Ulysses' way there, of query heads, and of KV heads that go to two ranks each; and their ways back
        attention = ulysses.Attention(comm, device, lengths, heads, kv_heads, LocalAttention(device, None))
        for count, parts, back in ((heads, attention.heads, attention._to_positions),
                                   (kv_heads, attention.kv_heads, attention._sum_at_positions)):
            x = rng.standard_normal((2, own, count, 6))
            there = attention._to_heads(x, parts)
            y = rng.standard_normal(there.shape)
            pairs.append((np.vdot(there, y), np.vdot(x, back(y))))
        # all-gather and reduce-scatter
        gathering = all_gather.Attention(comm, device, Chunks.of(positions(9, 4, "zigzag"), None))
        x = rng.standard_normal((2, own, 2, 6))
        there = gathering._gather(x).wait()
        y = rng.standard_normal(there.shape)
        pairs.append((np.vdot(there, y), np.vdot(x, gathering._scatter(y).wait())))
        # a whole turn of the ring: a chunk comes home as it went
        x = rng.standard_normal((2, own, 2, 6))
        turned = x
        for step in range(comm.size):
            length = lengths[(comm.rank - step - 1) % comm.size]
            (turned,) = start_hop(comm, device, "turn", [turned], length).wait()
        assert np.array_equal(turned, x)
        # blocks from everyone to everyone, twice, come back
        blocks = [rng.standard_normal((1, own, 3)) for _ in range(comm.size)]
        came = exchange(comm, device, "there", blocks, lengths)
        back = exchange(comm, device, "back", came, [own] * comm.size)
        assert all(np.array_equal(a, b) for a, b in zip(blocks, back, strict=True))
        return pairs

    for pair in zip(*rd.run(program, ranks=4), strict=True):
        there, back = np.sum(pair, axis=0)
        assert abs(there - back) < 1e-12 * abs(there)


@pytest.mark.parametrize("plan", [
    {"cp": 2, "tp": 2, "dp": 2}, {"cp": 3, "tp": 2, "cp_method": "all_gather", "sequence_parallel": False},
    {"cp": 4, "tp": 2, "cp_method": "ring", "cp_ulysses": 2, "micro_batches": 2}, {"cp": 2, "tp": 4, "cp_method": "ulysses"}])
def test_the_model_with_tensor_and_context_parallelism(plan):
    config, params = model(num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True, attention_bias=True)
    ids, labels = batch(config, rows=3, seq=13)
    segments = segments_of(ids, 1)
    loss, grads = rd.reference.loss_and_grads(config, params, ids, labels, segment_ids=segments)
    plan = rd.Plan(**plan)
    for got in rd.run(lambda comm: rd.loss_and_grads(config, plan, params, ids, labels, comm=comm, segment_ids=segments),
                      ranks=plan.world_size):
        assert abs(got[0] - loss) < 1e-12
        require_equal(got[1], grads, str(plan))


@pytest.mark.parametrize(("plan", "reason"), [
    ({"cp": 3, "cp_method": "ulysses"}, r"4 attention heads cannot be exchanged among 3 ranks .*: 3 does not divide 4"),
    ({"cp": 4, "cp_method": "ulysses", "tp": 2}, "2 attention heads on each of tp=2 ranks"),
    ({"cp": 3, "cp_ulysses": 2}, "cp_ulysses=2 does not divide cp=3")])
def test_what_cannot_be_cut_is_refused_with_the_reason(plan, reason):
    config, params = model(num_attention_heads=4, num_key_value_heads=2)
    ids, labels = batch(config)
    plan = rd.Plan(**plan)
    with pytest.raises(rd.PlanError, match=reason):
        rd.run(lambda comm: rd.loss_and_grads(config, plan, params, ids, labels, comm=comm), ranks=plan.world_size)


def test_somebody_elses_ring_takes_the_place_of_ours():
    class Backwards(ring.Attention):
        """A ring that attends to nothing but its own chunk: wrong, so that it shows that it was used."""

        def _sees(self, source):
            return False

    config, params = model()
    ids, labels = batch(config)
    room = type("room", (), {"Attention": Backwards})
    loss, _ = rd.reference.loss_and_grads(config, params, ids, labels)
    (got, _), _ = rd.run(lambda comm: rd.loss_and_grads(config, rd.Plan(cp=2), params, ids, labels, comm=comm,
                                                        implementations={"ring": room}), ranks=2)
    assert abs(got - loss) > 1e-3


@pytest.mark.parametrize(("method", "cp", "pairs_within"), [
    ("ring", 4, 1), ("ring", 4, 2), ("all_gather", 3, 1), ("ulysses", 4, 1)])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_pictures_show_every_block_once(method, cp, pairs_within, layout):
    picture = trace(cp, method, layout, pairs_within, seq=31)
    assert picture.work.sum() == 31**2 / 2 * 8  # heads
    assert len({(block.heads, block.queries, block.keys) for block in picture.blocks}) == len(picture.blocks)
    assert picture.steps == (cp // pairs_within if method == "ring" else 1)
    ElementTree.fromstring(picture.svg())
    assert f"rank {cp - 1}" in str(picture)


def test_the_command_draws_what_the_page_shows(capsys, tmp_path):
    assert main(["show", "attention", "--cp", "2", "--layout", "contiguous"]) == 0
    assert capsys.readouterr().out == CONTIGUOUS
    assert main(["show", "attention", "--cp", "2", "--svg", str(tmp_path / "a.svg")]) == 0
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    capsys.readouterr()
    assert main(["show", "attention", "--cp", "4", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len({sum(row["work"]) for row in rows if "work" in row}) == 1
    assert main(["show", "attention", "--cp", "3", "--method", "ulysses"]) == 2


CONTIGUOUS = """\
ring attention, contiguous, 2 ranks, 16 positions
in a block: rank.step; rows are chunks of queries, columns are chunks of keys

heads 0 to 7
          0    1
     0  0.0    ·
     1  1.1  1.0

rank 0       256 pairs   25.0%   steps: ██████ ·
rank 1       768 pairs   75.0%   steps: ██████ ████████████
"""


PICTURES = {"ring": {}, "contiguous": {"layout": "contiguous"}, "all_gather": {"method": "all_gather"},
            "ulysses": {"method": "ulysses"}, "ring-ulysses": {"ulysses": 2}}


@pytest.mark.parametrize("name", PICTURES)
def test_the_pages_pictures_are_those_of_the_code(name):
    docs = Path(__file__).resolve().parent.parent / "docs"
    assert (docs / "pictures" / f"attention-{name}.svg").read_text(encoding="utf-8") == trace(4, **PICTURES[name]).svg()
    assert f"(pictures/attention-{name}.svg)" in (docs / "context-parallel.md").read_text(encoding="utf-8")


def test_gathered_keys_and_values_are_counted():
    """The price of ``all_gather``: keys and values of the whole sequence on every rank, while it attends."""
    config, params = model(num_hidden_layers=2)
    ids, labels = batch(config, 2, 12)

    def program(comm):
        alive = []

        def listen(event):
            if isinstance(event, Kernel) and event.name.startswith("attention"):
                alive.append(device.live["communication"])

        device = rd.Device(listeners=[listen])
        rd.loss_and_grads(config, rd.Plan(cp=3, cp_method="all_gather"), params, ids, labels, comm=comm, device=device)
        return alive

    whole = 2 * 12 * config.num_key_value_heads * config.head_dim * 8
    assert rd.run(program, 3) == [[2 * whole] * 4] * 3
