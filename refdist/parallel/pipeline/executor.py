"""The executor: runs one stage's part of any schedule. It knows actions and messages, and no schedule by its name.

    program   F0  send F0  F1  send F1  receive B0  I0  send B0  W0  …
              │            │                        │            └─ weight gradients that I0 kept are computed and added now
              └────────────┴─ what backward needs is pushed onto the micro-batch's own stack, and popped there by I or B; as
                              backward takes a micro-batch's chunks in reverse, one stack serves all of a stage's chunks

What one action gives another (an activation on its way up, a gradient on its way back) is kept under the name of the place that
needs it: for a chunk on the same stage at once, for another stage by a message. A message that comes in gets memory of its own:
what a forward received is saved for its backward, and a later message must not overwrite it. A send is only started; its array is
kept alive until it is done. So the executor waits for nothing but its inputs, and any schedule that the checker accepts ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from refdist.comm import Comm
from refdist.comm.call import Call, Steps
from refdist.comm.message import fingerprint
from refdist.comm.work import Work, drive
from refdist.device import Device
from refdist.model.config import ModelConfig
from refdist.model.recompute import Recompute
from refdist.parallel.pipeline.action import Action, Place, Schedule, result_kind
from refdist.parallel.pipeline.communication import Message, add_communication, message_after, message_before
from refdist.parallel.stage import MicroBatch, ParameterStorage, Piece, Stage

__all__ = ["Executor", "Sink"]

_FIRST_TAG = 2  # those below are for a tied matrix and its gradient


class Sink:
    """Between a stage and the storage of its parameters: weight gradients are added at once, or kept for a W.

    Only gradients that take a matrix product are kept. Those of norms and biases are sums, cheaper than what keeping them would
    keep alive.

    Args:
        storage: what the rest is passed on to.
    """

    def __init__(self, storage: ParameterStorage) -> None:
        self.storage = storage
        self.weights = storage.weights
        self.expect = storage.expect
        self.drop = storage.drop
        self._kept: deque[Any] | None = None

    def add(self, name: str, kernel: Callable[..., Any], *args: Any) -> None:
        """Compute and add a weight gradient, now or later."""
        if self._kept is None or "matmul" not in getattr(kernel, "wants", ()):
            self.storage.add(name, kernel, *args)
        else:
            self._kept.append((name, kernel, args))

    def done(self, piece: Piece) -> None:
        """The piece's weight gradients of a micro-batch are complete: now, or when what is kept before has been added."""
        if self._kept is None:
            self.storage.done(piece)
        else:
            self._kept.append(piece)

    def keep(self) -> None:
        """From now on weight gradients are kept."""
        self._kept = deque()

    def kept(self) -> deque[Any]:
        """What has been kept since; from now on nothing is."""
        kept, self._kept = self._kept, None
        assert kept is not None
        return kept

    def add_kept(self, kept: deque[Any]) -> None:
        """Compute and add what had been kept; each gradient's inputs are given up as soon as it is there."""
        while kept:
            item = kept.popleft()
            if isinstance(item, tuple):
                name, kernel, args = item
                del item
                self.storage.add(name, kernel, *args)
                del args
            else:
                self.storage.done(item)


class Executor:
    """One stage of a pipeline.

    Args:
        schedule: a valid one, of as many stages as ``comm`` has ranks.
        config: of the whole model.
        chunks: the pieces of the model in each of this stage's chunks.
        sink: the storage of this stage's parameters.
        comm: the pipeline's ranks; rank s is stage s.
        device: holds what is received.
        recompute: what of a block's activations is kept until backward; everything if None.
    """

    def __init__(self, schedule: Schedule, config: ModelConfig, chunks: Sequence[Sequence[Piece]], sink: Sink, comm: Comm,
                 device: Device, recompute: Recompute | None = None) -> None:
        self.schedule = schedule
        self.program = add_communication(schedule)[comm.rank]
        self.stages = [Stage(config, pieces, sink, recompute) for pieces in chunks]
        self.sink = sink
        self.comm = comm
        self.device = device
        self._do = {"F": self._forward, "B": self._backward, "I": self._input_gradient, "W": self._weight_gradient}
        self._begin([], ())

    def _begin(self, batches: Sequence[MicroBatch], shape: tuple[int, ...]) -> None:
        self._batches = batches
        self._waiting: dict[tuple[str, int, Place], np.ndarray | None] = {}  # what the chunk at a place needs next
        self._kept: dict[tuple[int, int], deque[Any]] = {}  # (micro-batch, chunk) -> weight gradients between I and W
        self._sends: list[Work] = []
        self._shape = shape

    def run(self, batches: Sequence[MicroBatch], shape: tuple[int, ...]) -> float:
        """Forward and backward of all micro-batches; their weight gradients go to the sink.

        Args:
            batches: as many as the schedule has; every stage passes the same ones.
            shape: of an activation between stages without its rows: (seq, hidden) as this rank has them.

        Returns:
            The sum of the token losses; 0 on stages without the head.
        """
        self._begin(batches, shape)
        for step in self.program:
            if isinstance(step, Action):
                name = f"{step.kind} {step.micro_batch} {step.chunk}"
                self.device.phase(name, True)
                self._do[step.kind](step)
                self.device.phase(name, False)
            elif step.kind == "send":
                self._send(step)
            else:
                self._receive(step)
        for work in self._sends:
            work.wait()
        loss_sum = sum(batch.loss_sum for batch in batches)
        self._begin([], ())
        return loss_sum

    def losses(self, batches: Sequence[MicroBatch], shape: tuple[int, ...]) -> float:
        """The sum of the token losses, forward only, one micro-batch after the other; 0 on stages without the head."""
        self._begin(batches, shape)
        forwards = (action for micro_batch in range(len(batches)) for action in self._forwards(micro_batch))
        loss_sum = 0.0
        for action, receive, send in forwards:
            if receive is not None:
                self._receive(receive)
            y = self.stages[action.chunk].losses(self._batches[action.micro_batch], self._take(action))
            if self.schedule.target(self.comm.rank, action) is None:
                assert y is not None
                loss_sum += float(np.add.reduce(y, axis=None, dtype=np.float64))
            else:
                self._give(action, y)
            if send is not None:
                self._send(send)
        for work in self._sends:
            work.wait()
        self._begin([], ())
        return loss_sum

    def _forwards(self, micro_batch: int) -> list[tuple[Action, Message | None, Message | None]]:
        """This stage's forwards of a micro-batch, in the order of its path, with the receive before and the send after each."""
        stage = self.comm.rank
        actions = [Action("F", micro_batch, place.chunk) for place in self.schedule.path(micro_batch) if place.stage == stage]
        return [(action, message_before(self.schedule, stage, action), message_after(self.schedule, stage, action))
                for action in actions]

    # ------------------------------------------------------------------------------------------------ actions

    def _forward(self, action: Action) -> None:
        batch = self._batches[action.micro_batch]
        self._give(action, self.stages[action.chunk].forward(batch, self._take(action)))

    def _backward(self, action: Action) -> None:
        batch = self._batches[action.micro_batch]
        self._give(action, self.stages[action.chunk].backward(batch, self._take(action)))

    def _input_gradient(self, action: Action) -> None:
        self.sink.keep()
        self._backward(action)
        self._kept[action.micro_batch, action.chunk] = self.sink.kept()

    def _weight_gradient(self, action: Action) -> None:
        self.sink.add_kept(self._kept.pop((action.micro_batch, action.chunk)))

    def _take(self, action: Action) -> np.ndarray | None:
        """The input of an action; None where the model begins (forward) or ends (backward)."""
        here = Place(self.comm.rank, action.chunk)
        if self.schedule.source(self.comm.rank, action) is None:
            return None
        return self._waiting.pop((result_kind(action), action.micro_batch, here))

    def _give(self, action: Action, result: np.ndarray | None) -> None:
        """Keep the result of an action for the place that needs it."""
        target = self.schedule.target(self.comm.rank, action)
        if target is not None:
            self._waiting[result_kind(action), action.micro_batch, target] = result

    # ----------------------------------------------------------------------------------------------- messages

    def _send(self, message: Message) -> None:
        x = self._waiting.pop((message.what, message.micro_batch, message.target))
        assert x is not None
        self._sends = [work for work in self._sends if not work.advance()]
        self._sends.append(Work(self.comm.transport, _sending(self._call(message), x, message.peer)))

    def _receive(self, message: Message) -> None:
        batch = self._batches[message.micro_batch]
        context, shape = batch.context, (len(batch.ids), *self._shape)
        x = self.device.empty(context.rotary.cos, shape, dtype=context.dtype)  # its own memory, for as long as backward needs it
        drive(self.comm.transport, _receiving(self._call(message), x, message.peer))
        self._waiting[message.what, message.micro_batch, message.target] = x

    def _call(self, message: Message) -> Call:
        """What a message is matched by: a tag of its own, and a fingerprint, so that no other one can take its place."""
        position = self.schedule.position(message.target.stage, Action("F", message.micro_batch, message.target.chunk))
        assert position is not None
        number = (2 * position + (message.what == "B")) * self.schedule.micro_batches + message.micro_batch
        mark = fingerprint("pipeline", message.what, message.micro_batch, *message.source, *message.target)
        name = "activation" if message.what == "F" else "gradient"
        tag = _FIRST_TAG + number % (self.comm.transport.user_tags - _FIRST_TAG)
        return Call(self.comm, name, "", number, tag, mark)


def _sending(call: Call, x: np.ndarray, dest: int) -> Steps:
    yield (call.isend(np.asarray(x, order="C"), dest),)


def _receiving(call: Call, out: np.ndarray, source: int) -> Steps:
    yield (call.irecv(out, source),)
