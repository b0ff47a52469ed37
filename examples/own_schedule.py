"""A pipeline schedule made by hand: written down, checked, drawn, timed, and run against a single device.

    python examples/own_schedule.py                      three stages in this process
    mpirun -n 3 python examples/own_schedule.py          one on each rank

The idea: 1F1B with all weight gradients at the very end. Gradients of activations come back sooner, so a stage waits less than
under 1F1B; but it holds every micro-batch, as GPipe does, and waits more than under ZB-H1, which puts a weight gradient where a
stage would wait.
"""

import os

import numpy as np
from rich.console import Console

import refdist as rd
from refdist.cli.launch import launched
from refdist.parallel.pipeline import Action, Schedule, bubble, check, make_schedule, peak_in_flight, simulate
from refdist.parallel.pipeline.draw import terminal_chart


def lazy(stages: int, micro_batches: int, chunks: int) -> list[list[Action]]:
    """Forwards and input gradients as 1F1B has them, and after those every weight gradient."""
    schedule = []
    for actions in make_schedule("1f1b", stages, micro_batches).actions:
        first = [action._replace(kind="I") if action.kind == "B" else action for action in actions]
        schedule.append(first + [Action("W", micro_batch) for micro_batch in range(micro_batches)])
    return schedule


def look_at(name: str, schedule: Schedule) -> None:
    """Draw it, with its bubble for F = B = W and its micro-batches in flight."""
    spans = simulate(schedule)
    notes = [f"in flight {peak}" for peak in peak_in_flight(schedule)]
    console = Console(highlight=False)
    console.print(f"{name}: bubble {bubble(spans):g}, in flight at most {max(peak_in_flight(schedule))}")
    console.print(terminal_chart(spans, console.width, console.color_system is not None, notes), soft_wrap=True, end="")


def break_it() -> None:
    """What the checker says about a swapped pair on stage 1 and a missing weight gradient on stage 2."""
    lists = make_schedule(lazy, 3, 2).to_lists()
    lists[1][3], lists[1][5] = lists[1][5], lists[1][3]
    lists[2] = lists[2][:-1]
    for fault in check(make_schedule(lists, 3, 2)):
        print(f"the checker: {fault}")


def program(comm: rd.Comm) -> float:
    """Run it, and return how far its gradients are from a single device's, relative to the largest."""
    config = rd.ModelConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
                            num_key_value_heads=2)
    params = rd.init_params(config, dtype=np.float64)
    tokens = np.random.default_rng(1).integers(0, 64, (6, 17))
    ids, labels = tokens[:, :-1], tokens[:, 1:]
    plan = rd.Plan(pp=comm.size, schedule=lazy, micro_batches=6)
    _, gradients = rd.loss_and_grads(config, plan, params, ids, labels, comm=comm)
    _, single = rd.reference.loss_and_grads(config, params, ids, labels)
    largest = max(np.abs(gradient).max() for gradient in single.values())
    error = max(np.abs(gradients[name] - gradient).max() for name, gradient in single.items()) / largest
    assert error < 1e-12
    if comm.rank == 0:
        for name in ("1f1b", "zb_h1", lazy):
            look_at(name if isinstance(name, str) else "lazy", make_schedule(name, comm.size, 6))
        break_it()
        print(f"run on {comm.size} ranks: gradients differ from the single device's by {error:.0e} of the largest")
    return error


if __name__ == "__main__":
    if launched(os.environ):
        program(rd.mpi_world())
    else:
        rd.run(program, ranks=3)
