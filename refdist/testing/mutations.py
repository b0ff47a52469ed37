"""The one list of mutations: ways in which distributed training has gone wrong, as changes to this project's own code.

Each entry follows a public report where there is one (``REPORTS``). The list grows with every room; an entry whose fragment is
not in the code any more is an error of the test suite, not a pass.

    python -m refdist.testing.mutations                 the table: hash, room, report, name
    with apply("comm/ring_accumulates_its_own"): …      or by its hash, apply("4548c8")
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from refdist.testing.mutate import Mutation, MutationError, mutated

__all__ = ["MUTATIONS", "REPORTS", "apply", "find"]

_REDUCE = "refdist.comm.all_reduce:"
_GATHER = "refdist.comm.all_gather:"
_SCATTER = "refdist.comm.reduce_scatter:"
_BROADCAST = "refdist.comm.broadcast:"
_COMM = "refdist.comm.communicator:Comm."

COMM = [
    Mutation("comm/ring_accumulates_its_own", "comm:all_reduce", "K16", _REDUCE + "ring",
             "reduce(own[part], received, out=theirs)", "reduce(own[part], own[part], out=theirs)",
             also=("dp", "fsdp", "cp", "pp")),
    Mutation("comm/ring_does_not_reduce", "comm:all_reduce", "K16", _REDUCE + "ring",
             "mine = reduce(own[part], received, out=theirs)", "np.copyto(theirs, received)\n        mine = theirs",
             also=("dp", "fsdp", "cp", "pp")),
    Mutation("comm/ring_gathers_into_the_wrong_chunk", "comm:all_reduce", "", _REDUCE + "ring",
             "theirs = chunks[(rank - step) % size]", "theirs = chunks[(rank - step - 1) % size]",
             also=("dp", "fsdp", "cp", "pp")),
    Mutation("comm/ring_stops_one_step_early", "comm:all_reduce", "", _REDUCE + "ring",
             "for step in range(size - 1):\n        theirs", "for step in range(size - 2):\n        theirs",
             also=("dp", "fsdp", "cp", "pp")),
    Mutation("comm/ring_forgets_the_remainder", "comm:all_reduce", "", _REDUCE + "ring",
             "bounds(total.size, size)", "bounds(total.size - total.size % size, size)", also=("dp", "fsdp", "cp", "pp")),
    Mutation("comm/ring_sends_before_it_receives", "comm:all_reduce", "H9", _REDUCE + "ring",
             "yield call.irecv(received, left), call.isend(mine, right)",
             "yield (call.isend(mine, right),)\n        yield (call.irecv(received, left),)", also=("dp", "cp", "pp")),
    Mutation("comm/all_reduce_takes_raw_memory", "comm:all_reduce", "K1", _REDUCE + "all_reduce",
             'x = np.array(x, order="C")', 'x = np.array(x, order="K").ravel(order="K").reshape(x.shape)'),
    Mutation("comm/all_reduce_writes_into_its_input", "comm:all_reduce", "K11", _REDUCE + "all_reduce",
             "total = np.empty_like(x)", "total = x if x.flags.writeable else np.empty_like(x)"),
    Mutation("comm/doubling_loses_the_folded_rank", "comm:all_reduce", "", _REDUCE + "recursive_doubling",
             "x = reduce(incoming, x, out=total)\n        call.step", "reduce(incoming, x, out=total)\n        call.step",
             also=("dp", "fsdp", "pp")),
    Mutation("comm/tree_forgets_a_leaf", "comm:all_reduce", "H1", _REDUCE + "tree",
             "elif reach <= rank < 2 * reach:", "elif reach < rank < 2 * reach:"),
    Mutation("comm/double_tree_forgets_the_remainder", "comm:all_reduce", "", "refdist.comm.double_tree:double_tree",
             "bounds(total.size, 2)", "bounds(total.size - total.size % 2, 2)"),
    Mutation("comm/nodes_do_not_add_up", "comm:all_reduce", "K5", _REDUCE + "hierarchical",
             "yield from ring(call.among([node[place] for node in nodes]), chunk, chunk, reduce)", "pass"),
    Mutation("comm/average_is_a_sum", "comm:all_reduce", "L12", "refdist.comm.reduction:divide",
             "np.divide(total, size,", "np.divide(total, 1,"),
    Mutation("comm/average_is_taken_twice", "comm:all_reduce", "L4", "refdist.comm.reduction:divide",
             "np.divide(total, size,", "np.divide(total, size * size,"),
    Mutation("comm/halving_keeps_the_wrong_half", "comm:reduce_scatter", "", _SCATTER + "halving",
             "if rank < middle else", "if rank >= middle else", also=("tp", "cp")),
    Mutation("comm/reduce_scatter_gives_the_neighbours_shard", "comm:reduce_scatter", "K3", _SCATTER + "ring",
             "mine = shards[(rank - 2 - step) % size]", "mine = shards[(rank - 1 - step) % size]"),
    Mutation("comm/reduce_scatter_reuses_a_buffer_in_flight", "comm:reduce_scatter", "K11", _SCATTER + "ring",
             "received = buffers[step % 2][:mine.size]", "received = buffers[0][:mine.size]"),
    Mutation("comm/reduce_scatter_forgets_its_own_part", "comm:reduce_scatter", "", _SCATTER + "ring",
             "partial = reduce(mine, received, out=own if step == size - 2 else received)",
             "partial = np.copyto(own, received) if step == size - 2 else reduce(mine, received, out=received)"),
    Mutation("comm/direct_receives_into_its_own_part", "comm:reduce_scatter", "K11", _SCATTER + "direct",
             "contributions.insert(rank, shards[rank])", "contributions.insert(0, shards[rank])", also=("dp", "fsdp")),
    Mutation("comm/all_gather_takes_raw_memory", "comm:all_gather", "K1", _GATHER + "all_gather",
             "np.copyto(whole[offsets[comm.rank]:offsets[comm.rank + 1]], lead)",
             'np.copyto(whole[offsets[comm.rank]:offsets[comm.rank + 1]], lead.ravel(order="K").reshape(lead.shape))'),
    Mutation("comm/all_gather_passes_on_its_own", "comm:all_gather", "K16", _GATHER + "ring",
             "call.isend(shards[(rank - step) % size], right)", "call.isend(shards[rank], right)"),
    Mutation("comm/all_gather_turns_the_wrong_way", "comm:all_gather", "", _GATHER + "bruck",
             "order = [(rank + place) % size", "order = [(rank - place) % size"),
    Mutation("comm/all_gather_ignores_the_axis", "comm:all_gather", "", _GATHER + "all_gather",
             "result = whole if axis == 0 else np.moveaxis(whole, 0, axis)",
             "result = whole.reshape((*x.shape[:axis], total, *x.shape[axis + 1:]))"),
    Mutation("comm/all_gather_gives_a_folded_rank_too_little", "comm:all_gather", "", "refdist.comm.folding:fold",
             "(*range(0, paired, 2), *singles))", "(*range(1, paired, 2), *singles))"),
    Mutation("comm/broadcast_root_is_a_world_rank", "comm:broadcast", "K3", _BROADCAST + "binomial",
             "distance = (rank - root) % size", "distance = (call.comm.transport.rank - root) % size"),
    Mutation("comm/broadcast_does_not_wait_for_its_send", "comm:broadcast", "K11", _BROADCAST + "binomial",
             "yield (sender.isend(message, (rank + reach) % size, describes=x),)",
             "sender.isend(message, (rank + reach) % size, describes=x)"),
    Mutation("comm/broadcast_returns_the_input", "comm:broadcast", "", _BROADCAST + "broadcast",
             'x = np.array(comm.check_array(x), order="C") if', "x = np.ascontiguousarray(comm.check_array(x)) if"),
    Mutation("comm/reduce_forgets_the_first_child", "comm:reduce", "", "refdist.comm.reduce:binomial",
             "partial = reduce(partial, incoming, out=total)", "partial = reduce(x, incoming, out=total)"),
    Mutation("comm/gather_in_the_order_of_distance", "comm:gather", "K3", "refdist.comm.gather:gather",
             "blocks[(rank - root) % comm.size]", "blocks[rank]"),
    Mutation("comm/scatter_in_the_order_of_distance", "comm:scatter", "K3", "refdist.comm.scatter:scatter",
             "arrays[(root + away) % comm.size]", "arrays[away]"),
    Mutation("comm/counts_do_not_fit_their_type", "comm:gather", "K9", "refdist.comm.blocks:received_blocks",
             "np.prod(table, axis=1, dtype=np.int64)", "np.prod(table, axis=1, dtype=np.int8)"),
    Mutation("comm/all_to_all_keeps_what_it_sends", "comm:all_to_all", "K16", "refdist.comm.all_to_all:pairwise",
             "received[source] = call.received(request)", "received[to] = call.received(request)"),
    Mutation("comm/all_to_all_in_the_order_of_distance", "comm:all_to_all", "K3", "refdist.comm.all_to_all:bruck",
             "moving[(rank - source) % size]", "moving[source]"),
    Mutation("comm/barrier_skips_ranks", "comm", "H7", "refdist.comm.barrier:barrier", "distance *= 2", "distance *= 3"),
    Mutation("comm/messages_go_to_world_ranks", "comm", "K3", "refdist.comm.call:Call.isend", "self.members[dest]", "dest",
             also=("dp", "fsdp", "pp")),
    Mutation("comm/split_ignores_the_key", "comm", "K3", _COMM + "split",
             "group.sort(key=lambda rank: (table[rank, 2], rank))", "group.sort()"),
    Mutation("comm/split_makes_everyone_a_member", "comm", "H5", _COMM + "split",
             "if table[rank, 0] and table[rank, 1] == color]", "if table[rank, 1] == color]"),
]

_REQUEST = "refdist.comm.transport:Request."
_IN_PROCESS = "refdist.comm.inprocess:"

DIAGNOSIS = [
    Mutation("diagnosis/headers_are_not_compared", "faults", "", _REQUEST + "verify", "self.header != self.expected", "False"),
    Mutation("diagnosis/sent_arrays_may_change", "faults", "K11", _REQUEST + "verify",
             "zlib.crc32(self.payload.data) != checksum", "False"),
    Mutation("diagnosis/sent_arrays_may_be_written_to", "faults", "K11", _REQUEST + "guard",
             "array.flags.writeable = False", "pass"),
    Mutation("diagnosis/poison_is_not_noticed", "faults", "O3", "refdist.comm.transport:Transport.check_reads",
             "np.shares_memory(array, request.payload)", "False"),
    Mutation("diagnosis/leftovers_are_not_looked_for", "faults", "", _IN_PROCESS + "_World._no_leftovers", "if left:",
             "if False:"),
    Mutation("diagnosis/rendezvous_does_not_wait", "faults", "H9", _IN_PROCESS + "_InProcess.isend", "if not self.rendezvous:",
             "if True:"),
    Mutation("diagnosis/ranks_that_have_finished_are_not_named", "faults", "H1", "refdist.comm.diagnosis:report",
             'lines.append(f"  rank {rank} {doing}")', "pass"),
    Mutation("diagnosis/different_calls_look_like_a_deadlock", "faults", "H2", "refdist.comm.diagnosis:explain",
             "len(marks) > 1", "len(marks) > 9"),
    Mutation("diagnosis/a_rank_is_a_member_of_every_group", "faults", "K3", _COMM + "__init__",
             "self.rank = members.index(transport.rank)", "self.rank = transport.rank % len(members)"),
]

_STORAGE = "refdist.parallel.data:Storage."
_REPLICA = "refdist.parallel.replica:Replica."
_CUT = "refdist.parallel.batch:micro_batches"
_TRAINER = "refdist.train.trainer:Trainer."

DATA = [
    Mutation("data/rank_0_reduces_alone", "dp", "H7", _REPLICA + "forward_backward", "self.storage.reduce()",
             "self.storage.reduce() if self.mesh.comm.rank == 0 else None", also=("fsdp", "cp", "pp")),
    Mutation("data/a_rank_without_labels_does_not_reduce", "dp", "H1", _REPLICA + "forward_backward", "self.storage.reduce()",
             "self.storage.reduce() if any(valid_tokens(batch.labels) for batch in batches) else None", also=("fsdp", "cp")),
    Mutation("data/mean_of_micro_batch_means", "dp", "L1", _REPLICA + "forward_backward",
             "batch.scale = loss_scale / tokens",
             "batch.scale = 1 / max(valid_tokens(batch.labels), 1) / len(batches) / self.plan.dp", also=("fsdp", "cp", "pp")),
    Mutation("data/token_count_of_this_rank", "dp", "L3", _REPLICA + "forward_backward",
             "tokens = self._sum(sum(valid_tokens(batch.labels) for batch in batches))",
             "tokens = self.plan.dp * max(sum(valid_tokens(batch.labels) for batch in batches), 1)", also=("fsdp", "cp", "pp")),
    Mutation("data/loss_averaged_over_ranks_again", "dp", "L4", _REPLICA + "forward_backward",
             "self._sum(loss_sum) / tokens, int", "self._sum(loss_sum) / tokens / self.plan.dp, int", also=("fsdp", "pp")),
    Mutation("data/loss_scaled_by_the_world", "dp", "L5", _REPLICA + "forward_backward",
             "batch.scale = loss_scale / tokens", "batch.scale = self.plan.world_size / tokens", also=("fsdp", "tp", "cp", "pp")),
    Mutation("data/gradients_averaged_over_ranks_again", "dp", "L7", _REPLICA + "forward_backward",
             "batch.scale = loss_scale / tokens", "batch.scale = loss_scale / tokens / self.plan.dp", also=("fsdp", "pp")),
    Mutation("data/running_gradient_is_scaled", "dp", "L10", _STORAGE + "add", "add(self._sums[name], gradient)",
             "add(self._sums[name], gradient)\n            self._sums[name] /= 2", also=("fsdp", "pp")),
    Mutation("data/micro_batches_are_not_divided_by", "dp", "L12", _REPLICA + "forward_backward",
             "batch.scale = loss_scale / tokens", "batch.scale = self.plan.micro_batches / tokens", also=("fsdp", "pp")),
    Mutation("data/last_micro_batch_wipes_the_others", "dp", "L13", _STORAGE + "add", "add(self._sums[name], gradient)",
             "store(gradient, self._sums[name])", also=("fsdp", "pp")),
    Mutation("data/reduced_after_the_first_micro_batch", "dp", "L17", _STORAGE + "done",
             "if any(self._remaining[other] for other in bucket.pieces):", "if bucket.work is not None:",
             also=("fsdp", "tp", "cp", "pp")),
    Mutation("data/reduced_after_every_micro_batch", "dp", "L19", _STORAGE + "done",
             "if any(self._remaining[other] for other in bucket.pieces):", "if piece != bucket.pieces[-1]:", also=("fsdp", "pp")),
    Mutation("data/reduction_is_thrown_away", "dp", "K5", _STORAGE + "done",
             '"all_reduce", sent, out=sent, ', '"all_reduce", sent, ', also=("fsdp", "cp", "pp")),
    Mutation("data/bucket_is_reduced_too_early", "dp", "O3", _STORAGE + "done",
             "if any(self._remaining[other] for other in bucket.pieces):", "if self._remaining[piece]:",
             also=("fsdp", "tp", "cp", "pp")),
    Mutation("data/nobody_waits_for_a_bucket", "dp", "O3", _STORAGE + "reduce", "bucket.work.wait()", "bucket.flat",
             also=("fsdp", "cp", "pp")),
    Mutation("data/gradients_are_not_forgotten", "dp", "L20", _STORAGE + "begin_step", "self._untouched = set(self.rows)",
             "pass", also=("fsdp", "tp", "cp", "pp")),
    Mutation("data/ranks_start_from_their_own_seeds", "dp", "L23", _TRAINER + "__init__", "init_params(config, seed)",
             "init_params(config, seed + comm.rank)", also=("fsdp", "tp", "pp")),
    Mutation("data/ranks_read_the_same_rows", "dp", "L30", _CUT, 'mesh.coordinate("dp")', "0", also=("fsdp", "pp")),
    Mutation("data/micro_batches_start_at_row_zero", "dp", "L30", _CUT, "array[first + start:first + end]", "array[start:end]",
             also=("fsdp", "pp")),
    Mutation("data/tie_is_lost", "dp", "P2", _STORAGE + "done", "add(self.gradients[EMBEDDING], self._head)", "pass",
             also=("fsdp", "tp", "cp", "pp")),
    Mutation("data/tie_is_counted_twice", "dp", "P5", _STORAGE + "done", "add(self.gradients[EMBEDDING], self._head)",
             "add(self.gradients[EMBEDDING], 2 * self._head)", also=("fsdp", "tp", "cp", "pp")),
    Mutation("data/norm_counts_every_replica", "dp", "T21", _REPLICA + "squared_norm",
             "own_part(owned[name][1], replicas)", "owned[name][1]", also=("fsdp", "cp", "pp")),
    Mutation("data/head_gradient_of_the_last_chunk", "dp", "", "refdist.model.transformer:head_forward_backward",
             "dw = dw_chunk if dw is None else call(ops.add, dw, dw_chunk)", "dw = dw_chunk"),
    Mutation("data/positions_of_another_length", "dp", "", "refdist.parallel.replica:Replica._context",
             "if self._shared is None or self._shared[0] != length:", "if self._shared is None:"),
]

_ZERO = "refdist.parallel.fsdp.zero"
_ROWS = "refdist.parallel.fsdp.units:"

FSDP = [
    Mutation("fsdp/norm_of_this_ranks_rows", "fsdp", "T24", _REPLICA + "squared_norm", "self.mesh.comm.all_reduce(mine)", "mine",
             also=("dp", "tp", "cp", "pp")),
    Mutation("fsdp/ranks_read_the_same_rows", "fsdp", "L30", _CUT, '* plan.fsdp + mesh.coordinate("fsdp")', "* plan.fsdp"),
    Mutation("fsdp/gradients_averaged_over_ranks", "fsdp", "L7", _ROWS + "reduce_scatter_rows",
             "np.add(mine, term, out=total)", "np.add(mine, term, out=total)\n            total /= size if owner == rank else 1"),
    Mutation("fsdp/rows_that_do_not_divide_belong_to_nobody", "fsdp", "", _ZERO + "1:Storage.__init__",
             "bounds(row.shape[0], self.group.size)",
             "[rank * (row.shape[0] // self.group.size) for rank in range(self.group.size + 1)]"),
    Mutation("fsdp/owner_keeps_its_own_gradient", "fsdp", "K5", _ROWS + "reduce_scatter_rows",
             "own if owner == rank else terms", "terms"),
    Mutation("fsdp/new_parameters_are_not_gathered", "fsdp", "O1", _ZERO + "1:Storage.updated",
             "for piece in pieces_of(self.rows):", "for piece in list(pieces_of(self.rows))[:-1]:"),
    Mutation("fsdp/last_micro_batch_wipes_the_others", "fsdp", "L13", _ZERO + "2:Storage._take",
             "add(total, summed)", "store(summed, total)"),
    Mutation("fsdp/replicas_are_summed_after_the_first_micro_batch", "fsdp", "L17", _ZERO + "2:Storage._take",
             "if not self._missing[name]:", "if self._missing[name] == self.plan.micro_batches - 1:"),
    Mutation("fsdp/replicas_keep_their_own_sums", "fsdp", "L19", _ZERO + "1:Storage._reduce_over_replicas",
             '"all_reduce", shard, out=shard, ', '"all_reduce", shard, '),
    Mutation("fsdp/tie_is_lost", "fsdp", "P2", _ZERO + "2:Storage.add",
             "gradient = add(self._first_term(gradient), self._head)", "pass"),
    Mutation("fsdp/tie_is_counted_twice", "fsdp", "P5", _ZERO + "2:Storage.add", "add(self._first_term(gradient), self._head)",
             "add(self._first_term(gradient), 2 * self._head)"),
    Mutation("fsdp/tied_head_of_the_last_micro_batch", "fsdp", "L13", "refdist.parallel.storage:BaseStorage.add",
             "self._first_term(gradient) if self._head is None else add(self._head, gradient)", "self._first_term(gradient)"),
    Mutation("fsdp/parameters_of_the_step_before", "fsdp", "O1", _ZERO + "3:Storage.updated", "self._forget(list(self.gathered))",
             "pass"),
    Mutation("fsdp/nobody_waits_for_a_gather", "fsdp", "O3", _ZERO + "3:Storage.weights", "work.wait()", "pass"),
    Mutation("fsdp/next_layer_is_gathered_into_this_ones_memory", "fsdp", "O3", _ZERO + "3:Storage._fetch",
             'self.device.empty(self.parameters[name], self.rows[name].shape, "gathered") for name in missing',
             "next((other for other in self.gathered.values() if other.shape == self.rows[name].shape),\n"
             '                            self.device.empty(self.parameters[name], self.rows[name].shape, "gathered"))'
             " for name in missing"),
    Mutation("fsdp/rank_sums_start_with_another_ranks", "fsdp", "K3", _ZERO + "2:Storage._add_in_rank_order",
             "np.copyto(total, contributions[0])", "np.copyto(total, contributions[-1])"),
    Mutation("fsdp/gather_receives_into_what_it_sends", "fsdp", "O3", _ROWS + "gather_rows",
             "buffers[1 - step % 2]", "buffers[step % 2]"),
    Mutation("fsdp/rows_of_a_layer_go_to_another_ranks_place", "fsdp", "", _ROWS + "gather_rows",
             "_unpack(received, rows[source])", "_unpack(received, rows[left])"),
    Mutation("fsdp/sums_of_a_layer_receive_into_what_they_send", "fsdp", "O3", _ROWS + "reduce_scatter_rows",
             "buffers[1 - step % 2]", "buffers[step % 2]"),
    Mutation("fsdp/sums_of_a_layer_start_at_their_owner", "fsdp", "", _ROWS + "reduce_scatter_rows",
             "np.concatenate(rows[left], out=moving)", "np.concatenate(rows[rank], out=buffers[0][:lengths[rank]])"),
    Mutation("fsdp/nobody_waits_for_a_reduce_scatter", "fsdp", "O3", _ZERO + "1:Storage._collect", "work.wait()", "pass"),
]

_PIPELINE = "refdist.parallel.pipeline."
_EXECUTOR = _PIPELINE + "executor:Executor."
_SINK = _PIPELINE + "executor:Sink."

PIPELINE = [
    Mutation("pipeline/tied_gradient_comes_after_the_reduction", "pp", "P1", _PIPELINE + "tied:TiedFirst.__init__",
             "self._sending: Work | None = None",
             "self.add = storage.add\n"
             "        def late(piece):\n"
             "            storage.done(piece)\n"
             "            self._coming -= piece == 'embed'\n"
             "            if piece == 'embed' and not self._coming:\n"
             "                add(storage.gradients[EMBEDDING], _received(comm, last))\n"
             "        self.done = late"),
    Mutation("pipeline/tie_is_lost", "pp", "P2", _PIPELINE + "tied:TiedFirst.add",
             "self.storage.add(HEAD, _received, self.comm, self.last)", "_received(self.comm, self.last)"),
    Mutation("pipeline/tied_copy_of_the_first_step", "pp", "P2", _PIPELINE + "tied:TiedLast.begin",
             'self._copy = self.device.copy(self.comm.recv(self.first, _MATRIX), "gathered")',
             "self._copy = self.__dict__.setdefault('kept', self.comm.recv(self.first, _MATRIX))"),
    Mutation("pipeline/tie_is_counted_twice", "pp", "P5", _PIPELINE + "tied:_received", "return comm", "return 2 * comm"),
    Mutation("pipeline/tied_head_of_the_last_micro_batch", "pp", "L13", _PIPELINE + "tied:TiedLast.add",
             "if self._gradient is None:", "if True:"),
    Mutation("pipeline/last_weight_gradient_is_not_added", "pp", "P6", _SINK + "add_kept",
             "self.storage.add(name, kernel, *args)", "len(kept) < 3 or self.storage.add(name, kernel, *args)"),
    Mutation("pipeline/layers_are_numbered_from_zero_on_each_stage", "pp", "P9", _PIPELINE + "stages:pieces_of_places",
             "list(range(layer, layer + count))", "list(range(count))"),
    Mutation("pipeline/received_into_memory_that_backward_needs", "pp", "", _EXECUTOR + "_receive",
             "x = self.device.empty(context.rotary.cos, shape, dtype=context.dtype)",
             "x = self.__dict__.setdefault(f'buffer {message.what} {len(batch.ids)}',\n"
             "                                  self.device.empty(context.rotary.cos, shape, dtype=context.dtype))"),
    Mutation("pipeline/warm_up_longer_than_the_batch", "pp", "H2", _PIPELINE + "schedules.one_f_one_b:one_f_one_b",
             "min(stages - stage - 1, micro_batches)", "stages - stage - 1"),
    Mutation("pipeline/recomputed_groups_span_chunks", "pp", "", "refdist.parallel.stage:Stage.forward",
             "piece - self._first_layer", "len(batch.saved)"),
    Mutation("recompute/attention_forgets_its_dropout", "pp", "", "refdist.model.transformer:attention_again",
             "context.dropout.attention(layer) if context.dropout else None", "None"),
    Mutation("recompute/every_block_of_a_group_is_the_last", "pp", "", "refdist.model.recompute:restore",
             "number = layer - (len(stack) - 1 - place)", "number = layer"),
    Mutation("pipeline/neighbours_count_the_warm_up_differently", "pp", "H2", _PIPELINE + "schedules.interleaved:interleaved",
             "2 * min(stages - stage - 1,", "2 * min(stage,"),
    Mutation("pipeline/norm_of_this_stage", "pp", "T24", _REPLICA + "squared_norm", "self.mesh.comm.all_reduce(mine)", "mine",
             also=("dp", "fsdp", "tp", "cp")),
    Mutation("pipeline/loss_of_this_stage", "pp", "", _PIPELINE + "stages:Pipeline._executed",
             "if self.comm.size == 1:", "if True:"),
]

_OPTIMIZERS = "refdist.optim.optimizers:"

OPTIMIZER = [
    Mutation("optimizer/clipped_below_the_threshold", "optimizer", "T24", "refdist.optim.clip:clip_scale",
             "1.0 if max_norm is None or norm <= max_norm", "1.0 if max_norm is None", also=("dp", "fsdp", "pp")),
    Mutation("optimizer/never_clipped", "optimizer", "T20", _TRAINER + "update",
             "clip_scale(result.grad_norm, self.clip_norm)", "1.0", also=("dp", "fsdp", "pp")),
    Mutation("optimizer/clipping_is_not_applied", "optimizer", "T20", _OPTIMIZERS + "Optimizer.update",
             "g if scale == 1.0 else g * g.dtype.type(scale)", "g", also=("dp", "fsdp", "pp")),
    Mutation("optimizer/norms_and_biases_decay", "optimizer", "", _OPTIMIZERS + "Optimizer.decay",
             "if ndim >= 2 or self.decay_all else 0.0", "if ndim >= 1 or self.decay_all else 0.0", also=("dp", "fsdp", "pp")),
    Mutation("optimizer/adam_step_count_stays", "optimizer", "O6", _TRAINER + "update", "self.steps += 1", "self.steps = 1",
             also=("dp", "fsdp", "pp")),
    Mutation("optimizer/adam_first_moment_is_biased", "optimizer", "", _OPTIMIZERS + "AdamW._update_block",
             "scratch *= rate / (1 - beta1**step)", "scratch *= rate", also=("dp", "fsdp", "pp")),
    Mutation("optimizer/adam_second_moment_is_biased", "optimizer", "", _OPTIMIZERS + "AdamW._update_block",
             "1 / (1 - beta2**step)", "1.0", also=("dp", "fsdp", "pp")),
    Mutation("optimizer/adam_eps_under_the_root", "optimizer", "", _OPTIMIZERS + "AdamW._update_block",
             "np.sqrt(scratch, out=scratch)\n        scratch += self.eps",
             "scratch += self.eps\n        np.sqrt(scratch, out=scratch)", also=("dp", "fsdp", "pp")),
    Mutation("optimizer/adam_decay_ignores_the_rate", "optimizer", "", _OPTIMIZERS + "AdamW._update_block",
             "p *= 1 - rate * decay", "p *= 1 - 0.1 * decay", also=("dp", "fsdp", "pp")),
    Mutation("optimizer/adam_decay_is_coupled", "optimizer", "", _OPTIMIZERS + "AdamW._update_block",
             "m, v = moments", "m, v = moments\n        g = g + decay * p", also=("dp", "fsdp", "pp")),
    Mutation("optimizer/sgd_momentum_is_dampened", "optimizer", "", _OPTIMIZERS + "SGD._update_block",
             "buffer += g", "buffer += (1 - self.momentum) * g", also=("dp", "fsdp", "pp")),
    Mutation("optimizer/sgd_forgets_nesterov", "optimizer", "", _OPTIMIZERS + "SGD._update_block",
             "g = g + self.momentum * buffer if self.nesterov else buffer", "g = buffer", also=("dp", "fsdp", "pp")),
]

_LAYER = "refdist.model.transformer:_Layer."
_SHARDING = "refdist.parallel.sharding:"
_REGIONS = "refdist.parallel.tensor.regions:TensorParallel."
_VOCABULARY = "refdist.parallel.tensor.vocabulary:"

TENSOR = [
    Mutation("tensor/row_bias_on_every_rank", "tp", "T1", _LAYER + "row_linear",
             'self.call(ops.linear, x, self.weights[name + ".weight"]))',
             'self.call(ops.linear, x, self.weights[name + ".weight"], self.tensor.rank and self.weights.get(name + ".bias")'
             ' if self.tensor.rank else None))'),
    Mutation("tensor/norm_gradients_are_not_summed", "tp", "T2", _SHARDING + "sum_partial",
             "((comm, False), (copies, True))", "((copies, True),)"),
    Mutation("tensor/shared_kv_head_gradients_are_not_summed", "tp", "T5", _SHARDING + "sum_partial",
             "((comm, False), (copies, True))", "((comm, False),)"),
    Mutation("tensor/row_bias_gradient_called_whole", "tp", "T8", "refdist.model.layout:layout",
             '(hidden,), layer, {"fsdp": 0}, on_shards))\n\n    def norm',
             '(hidden,), layer, {"fsdp": 0}, tokens))\n\n    def norm'),
    Mutation("tensor/loss_counts_a_rank_twice", "tp", "T12", _VOCABULARY + "whole_cross_entropy",
             "for term in terms[1:]:", "for term in terms:"),
    Mutation("tensor/labels_count_from_zero_on_every_rank", "tp", "", _VOCABULARY + "part_cross_entropy_backward",
             "columns = labels[:, None] - first", "columns = labels[:, None]"),
    Mutation("tensor/same_attention_dropout_on_every_rank", "tp", "T18", _REPLICA + "_micro_batches",
             "first_head = axis.rank *", "first_head = 0 *"),
    Mutation("tensor/same_branch_dropout_on_every_rank", "tp", "T18", _REPLICA + "_micro_batches",
             "positions[axis.part]", "positions[:len(positions[axis.part])]"),
    Mutation("tensor/norm_counts_whole_parameters_on_every_rank", "tp", "T21", _SHARDING + "counted", "else rank == 0",
             "else True"),
    Mutation("tensor/norm_counts_shared_kv_heads_on_every_rank", "tp", "T21", _SHARDING + "counted", "rank % row.copies == 0",
             "True"),
    Mutation("tensor/input_gradient_is_not_reduced", "tp", "K5", _REGIONS + "enter_backward",
             "return self._scatter(dx)", "return Ready(np.array(dx[:, self.part]))"),
    Mutation("tensor/f_forgets_its_adjoint", "tp", "K6", _REGIONS + "enter_backward",
             'else self.comm.start("all_reduce", dx, out=dx)', "else Ready(dx)"),
    Mutation("tensor/g_reduces_in_backward_too", "tp", "K6", _REGIONS + "leave_backward", "else dy",
             "else self.comm.all_reduce(dy)"),
    Mutation("tensor/heads_are_not_put_back_in_order", "tp", "", _SHARDING + "_gathered", "of_ranks[::rows[name].copies]",
             "of_ranks[:len(of_ranks) // rows[name].copies]"),
    Mutation("tensor/chunks_by_its_own_columns", "tp", "H5", "refdist.model.transformer:head_forward_backward",
             "ops.token_chunks(labels.size, tensor.columns)", "ops.token_chunks(labels.size, w.shape[0])"),
    Mutation("tensor/vocabulary_rows_of_the_first_rank", "tp", "", "refdist.parallel.tensor.regions:TensorParallel.embedding",
             "self.cuts[self.rank])", "self.cuts[0])"),
    Mutation("tensor/labels_wrap_in_their_own_integers", "tp", "K9", "refdist.parallel.replica:Replica._micro_batches",
             "(array.astype(np.int64, copy=False) for array in (input_ids, labels))", "(input_ids, labels)"),
]

_RING = "refdist.parallel.context.ring:Attention."
_ALL_GATHER = "refdist.parallel.context.all_gather:Attention."
_ULYSSES = "refdist.parallel.context.ulysses:Attention."

CONTEXT = [
    Mutation("context/loss_scaled_by_cp", "cp", "C1", _REPLICA + "forward_backward",
             "batch.scale = loss_scale / tokens", "batch.scale = self.plan.cp / tokens"),
    Mutation("context/ring_loses_a_step_of_dk_and_dv", "cp", "C5", _RING + "backward",
             "self._add(terms, sums.wait())", "sums.wait()"),
    Mutation("context/ring_keeps_only_its_own_dk_and_dv", "cp", "C5", _RING + "backward", "self._add(home, sums.wait())",
             "sums.wait()"),
    Mutation("context/ring_calls_the_chunk_by_the_wrong_owner", "cp", "C5", _RING + "forward",
             "(rank - step) % size", "(rank + step) % size"),
    Mutation("context/ring_skips_later_ranks", "cp", "C8", _RING + "forward", "elif self._sees(source):",
             "elif source < rank:"),
    Mutation("context/merge_in_another_base", "cp", "C7", "refdist.ops.attention:merge_attention", "np.logaddexp(",
             "np.logaddexp2("),
    Mutation("context/positions_start_at_zero", "cp", "C8", _REPLICA + "_context",
             "Context.of(self.config, self.device, positions,",
             "Context.of(self.config, self.device, np.arange(len(positions)),"),
    Mutation("context/labels_lost_at_borders", "cp", "C11", _REPLICA + "_micro_batches", "targets[:, positions]",
             "np.where(np.arange(len(positions)) + 1 < len(positions) + (self.plan.cp == 1), targets[:, positions], -100)"),
    Mutation("context/gradients_averaged_over_cp", "cp", "C12", _REPLICA + "forward_backward",
             "batch.scale = loss_scale / tokens", "batch.scale = loss_scale / tokens / self.plan.cp"),
    Mutation("context/documents_are_not_kept_apart", "cp", "C14", "refdist.parallel.context.chunks:Chunks.of",
             "None if segment_ids is None else", "None if True else"),
    Mutation("context/shared_kv_head_gradients_are_not_summed", "cp", "C15", _ULYSSES + "_sum_at_positions",
             "whole[:, :, heads] += block", "whole[:, :, heads] = block"),
    Mutation("context/every_rank_takes_the_first_kv_heads", "cp", "C15", _ULYSSES + "__init__",
             "slice(part.start // group, -(-part.stop // group))", "slice(0, -(-part.stop // group) - part.start // group)"),
    Mutation("context/dropout_of_other_heads", "cp", "T18", _ULYSSES + "_shifted", "head + first", "head"),
    Mutation("context/ulysses_heads_come_back_in_another_order", "cp", "", _ULYSSES + "_to_positions",
             "self._joined(self._back(x), axis=2)", "self._joined(self._back(x)[::-1], axis=2)"),
    Mutation("context/gathered_gradients_are_not_reduced", "cp", "K5", _ALL_GATHER + "_scatter",
             'return self.comm.start("reduce_scatter", x, axis=1)',
             'return self.comm.start("reduce_scatter", x * (self.comm.rank == 0), axis=1)'),
    Mutation("context/positions_taken_to_be_in_order", "cp", "", "refdist.parallel.context.ring:Attention._sees",
             "keys.min() <= queries.max()", "keys[0] <= queries[-1]"),
    Mutation("context/dropout_of_the_first_heads_in_every_tile", "cp", "", "refdist.ops.attention:_factors",
             "slice(heads.start * group, heads.stop * group)", "slice(0, (heads.stop - heads.start) * group)"),
]

_BASE = "refdist.parallel.storage:BaseStorage."

PRECISION = [
    Mutation("precision/norm_of_scaled_gradients", "precision", "", _TRAINER + "forward_backward",
             "self.replica.squared_norm()) / loss_scale", "self.replica.squared_norm())"),
    Mutation("precision/scaled_gradients_update", "precision", "", _TRAINER + "update",
             "clip_scale(result.grad_norm, self.clip_norm) / result.loss_scale", "clip_scale(result.grad_norm, self.clip_norm)"),
    Mutation("precision/overflow_is_decided_locally", "precision", "O7", _TRAINER + "forward_backward", "not math.isfinite(norm)",
             "not all(np.isfinite(np.float64(own[1])).all() for own in self.replica.storage.owned().values())"),
    Mutation("precision/overflow_is_not_looked_for", "precision", "O7", _TRAINER + "forward_backward", "not math.isfinite(norm)",
             "False"),
    Mutation("precision/nan_is_no_overflow", "precision", "O7", "refdist.optim.clip:exact_squares",
             "digits[-1] += np.count_nonzero(np.isnan(sums))", "pass"),
    Mutation("precision/skipped_steps_count", "precision", "O6", _TRAINER + "update", "self.loss_scale.update(result.skipped)",
             "self.loss_scale.update(result.skipped)\n            self.steps += result.skipped"),
    Mutation("precision/scale_stays_after_an_overflow", "precision", "", _TRAINER + "update",
             "self.loss_scale.update(result.skipped)", "self.loss_scale.update(False)"),
    Mutation("precision/weights_do_not_follow_their_masters", "precision", "O1", _BASE + "updated",
             "store(master, self.shard(name))", "pass"),
    Mutation("precision/masters_start_rounded", "precision", "O6", _BASE + "__init__",
             "name: params[name][self.own(name)]", "name: self.shard(name)"),
    Mutation("precision/no_master_weights", "precision", "O6", _BASE + "__init__", "has_16_bits(dtype) and plan.master_weights",
             "False"),
    Mutation("precision/reduction_in_16_bits_whatever_the_plan_says", "precision", "O8", _BASE + "__init__",
             'DTYPES.get(plan.reduce_dtype or "", dtype)', "dtype"),
    Mutation("precision/mean_square_in_16_bits", "precision", "C7", "refdist.ops.norm:rms_norm",
             "np.vecdot(xs, xs)[:, None] / xs.shape[1]",
             "(np.vecdot(xs, xs)[:, None] / xs.shape[1]).astype(x.dtype).astype(r.dtype)"),
]

MUTATIONS: list[Mutation] = [*COMM, *DIAGNOSIS, *DATA, *FSDP, *PIPELINE, *OPTIMIZER, *TENSOR, *CONTEXT, *PRECISION]

_PYTORCH = "https://github.com/pytorch/pytorch/issues/"
_TRANSFORMERS = "https://github.com/huggingface/transformers/issues/"
_TITAN = "https://github.com/pytorch/torchtitan/issues/"

REPORTS = {
    "H1": _PYTORCH + "38174",
    "H7": "https://github.com/ICHEC/QNLP/issues/5",
    "H5": "https://github.com/laekov/fastmoe/issues/106",
    "H9": "https://github.com/mpi4py/mpi4py/issues/75",
    "K1": _PYTORCH + "159548",
    "K3": _PYTORCH + "130515",
    "K9": "https://github.com/open-mpi/ompi/issues/10187",
    "K11": "https://github.com/dealii/dealii/issues/13206",
    "K16": _PYTORCH + "31572",
    "K5": _PYTORCH + "120386",
    "L1": _TRANSFORMERS + "34191",
    "L3": _TRANSFORMERS + "34242",
    "L4": _TRANSFORMERS + "37474",
    "L5": _TRANSFORMERS + "39648",
    "L7": "https://github.com/meta-pytorch/torchtune/issues/2172",
    "L10": _TITAN + "1733",
    "L12": "https://github.com/deepspeedai/DeepSpeed/issues/7773",
    "L13": _TITAN + "3575",
    "O1": "https://github.com/NVIDIA/Megatron-LM/issues/950",
    "O3": "https://github.com/deepspeedai/DeepSpeed/issues/5523",
    "L17": "https://github.com/karpathy/build-nanogpt/issues/30",
    "L19": "https://github.com/huggingface/picotron/issues/5",
    "L20": "https://github.com/siboehm/ShallowSpeed/commit/e42f0e5",
    "L23": _TITAN + "166",
    "L30": "https://github.com/stanford-crfm/mistral/issues/194",
    "O7": "https://github.com/hpcaitech/ColossalAI/issues/1175",
    "O8": _PYTORCH + "106395",
    "O6": "https://github.com/deepspeedai/DeepSpeed/issues/762",
    "H2": _TITAN + "775",
    "P1": "https://github.com/NVIDIA/Megatron-LM/issues/844",
    "P6": "https://github.com/deepspeedai/Megatron-DeepSpeed/issues/442",
    "P9": "https://github.com/NVIDIA/Megatron-LM/commit/0504e973d8",
    "P2": "https://github.com/NVIDIA/Megatron-LM/issues/1548",
    "P5": _TITAN + "3174",
    "T20": "https://github.com/deepspeedai/DeepSpeed/issues/1801",
    "T21": _PYTORCH + "88955",
    "T24": _TITAN + "596",
    "T1": "https://github.com/huggingface/text-generation-inference/issues/1036",
    "T2": "https://github.com/EleutherAI/gpt-neox/issues/1257",
    "T5": "https://github.com/bigcode-project/Megatron-LM/issues/35",
    "T8": _TITAN + "3412",
    "T12": "https://github.com/NVIDIA/Megatron-LM/issues/7452",
    "T18": "https://github.com/InternLM/InternLM/issues/405",
    "C1": "https://github.com/NVIDIA/Megatron-LM/issues/906",
    "C5": "https://github.com/NVIDIA/Megatron-LM/issues/1464",
    "C7": "https://github.com/zhuzilin/ring-flash-attention/issues/42",
    "C8": "https://github.com/NVIDIA/Megatron-LM/issues/5243",
    "C11": _TRANSFORMERS + "36607",
    "C12": "https://github.com/deepspeedai/DeepSpeed/issues/5248",
    "C14": "https://github.com/axolotl-ai-cloud/axolotl/issues/2495",
    "C15": "https://github.com/vllm-project/vllm-omni/issues/6930",
    "K6": "https://github.com/jax-ml/jax/issues/3970",
}


def find(name: str) -> Mutation:
    """The entry of this name or hash; the first four digits of a hash are enough where no other begins with them."""
    for mutation in MUTATIONS:
        if name in (mutation.name, mutation.key):
            return mutation
    found = [mutation for mutation in MUTATIONS if len(name) >= 4 and mutation.key.startswith(name)]
    if len(found) != 1:
        raise MutationError(f"no mutation is named {name!r}: `python -m refdist.testing.mutations` lists them")
    return found[0]


@contextmanager
def apply(name: str) -> Iterator[Mutation]:
    """Inside, the code is broken in the way that the entry of this name or hash says."""
    with mutated(find(name)) as mutation:
        yield mutation


def main() -> None:
    """Print the list."""
    for mutation in MUTATIONS:
        print(f"{mutation.key}  {mutation.axis:<10} {mutation.report:<4} {mutation.name:<50} {mutation.target}")


if __name__ == "__main__":
    main()
