"""A lesson, or an exercise: refdist's own code is broken in one way, and the check says which gradients are wrong.

    refdist check --mutate list                                      what there is, with the axes that show it
    refdist check --mutate data/gradients_averaged_over_ranks_again  what is changed, who has reported it, what becomes wrong
    refdist check --mutate data/token_count_of_this_rank --dp 3      the same under a plan of one's own
    refdist check --mutate hashes                                    exercises: hashes that do not say what they do
    refdist check --mutate 3fa2                                      only what becomes wrong; where it is, is the question

Without a plan, small ones of the mutation's room are tried until one shows it. What one step's gradients cannot show (a second
step, an optimizer, a collective's corner) the property test does. Ranks are in-process: a mistake that hangs is seen at once.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
from dataclasses import dataclass
from typing import Any

import threadpoolctl

import refdist as rd
from refdist.cli import comparison
from refdist.cli.display import make_console
from refdist.cli.launch import launched
from refdist.cli.options import Parser, given
from refdist.testing.mutate import Mutation, MutationError, mutated
from refdist.testing.mutations import MUTATIONS, REPORTS, find

LISTS = ("list", "hashes")
SHOWN = 8  # gradients
LINES = 12  # of what a failing run says

TRIALS = {
    "comm": ("--dp 3", "--fsdp 3 --zero 1", "--fsdp 2 --tp 2", "--cp 4", "--dp 5 --hidden-size 128"),
    "dp": ("--dp 2", "--dp 3 --micro-batches 2", "--dp 2 --micro-batches 2 --tie-word-embeddings",
           "--dp 2 --micro-batches 3 --bucket-bytes 1"),
    "fsdp": ("--fsdp 2", "--fsdp 3 --micro-batches 2", "--fsdp 2 --zero 2 --dp 2 --micro-batches 2",
             "--fsdp 3 --zero 1 --micro-batches 2", "--fsdp 2 --zero 2 --micro-batches 2 --tie-word-embeddings",
             "--fsdp 2 --zero 1 --micro-batches 2 --tie-word-embeddings", "--fsdp 2 --zero 2 --order rank"),
    "tp": ("--tp 2", "--tp 2 --no-sequence-parallel", "--tp 4", "--tp 2 --attention-bias --mlp-bias",
           "--tp 4 --attention-bias --no-sequence-parallel"),
    "cp": ("--cp 2", "--cp 4", "--cp 3 --cp-layout contiguous", "--cp 2 --cp-method all_gather", "--cp 4 --cp-method ulysses"),
    "pp": ("--pp 2 --micro-batches 2", "--pp 2 --micro-batches 4 --schedule zb_h1",
           "--pp 2 --micro-batches 3 --tie-word-embeddings", "--pp 3 --num-hidden-layers 3",
           "--pp 2 --micro-batches 4 --num-hidden-layers 4 --schedule interleaved --virtual-stages 2",
           "--pp 2 --num-hidden-layers 4 --schedule zb_v --recompute full --recompute-blocks 2",
           "--pp 2 --micro-batches 2 --dp 2 --tie-word-embeddings"),
}
"""Room -> plans to try, the plainest first."""


@dataclass(frozen=True)
class Lesson:
    """What is shown.

    Attributes:
        mutation: what is broken; None: a list is printed.
        words: what was said: ``"list"``, ``"hashes"``, a name or a hash.
        trials: options and comparison of each plan to try; the user's own has no options.
        json: for machines.
        plan: None, since this starts its own ranks.
    """

    mutation: Mutation | None
    words: str
    trials: list[tuple[str, comparison.Job]]
    json: bool
    plan: None = None

    @property
    def hidden(self) -> bool:
        """Whether the mutation was asked for by its hash."""
        return self.mutation is not None and self.words != self.mutation.name


def prepare(args: argparse.Namespace) -> Lesson:
    """Find the mutation, and the plans to try it under."""
    if launched(os.environ) is not None:
        raise rd.ConfigError("--mutate starts in-process ranks of its own: without mpirun")
    if args.mutate in LISTS:
        return Lesson(None, args.mutate, [], args.json)
    try:
        mutation = find(args.mutate)
    except MutationError:
        if re.fullmatch("[0-9a-f]{1,3}", args.mutate):
            raise rd.ConfigError(f"--mutate {args.mutate}: expected a name, or 4 digits of a hash or more, of those that "
                                 "`--mutate hashes` prints") from None
        near = difflib.get_close_matches(args.mutate, [entry.name for entry in MUTATIONS], 1, 0.4)
        raise rd.ConfigError(f"--mutate {args.mutate}: there is no such mutation; `--mutate list` prints them"
                             + (f"; perhaps {near[0]}" if near else "")) from None
    if args.preset is not None or given(rd.Plan, args):
        return Lesson(mutation, args.mutate, [("", comparison.make_job(args))], args.json)
    reader = Parser()
    comparison.add_options(reader)
    room = mutation.axis.split(":")[0]
    trials = [(words, comparison.make_job(reader.parse_args(words.split()))) for words in TRIALS.get(room, ())]
    return Lesson(mutation, args.mutate, trials, args.json)


def program(lesson: Lesson) -> int:
    """Print the list, or what the mutation is and does: 1 if that is seen, 0 if the user's plan does not show it."""
    if lesson.mutation is None:
        print_list(lesson)
        return 0
    threadpoolctl.threadpool_limits(1, user_api="blas")
    if not lesson.json:
        print_mutation(lesson)
    for words, job in lesson.trials:
        found = trial(lesson.mutation, job)
        if isinstance(found, BaseException) or not found[2]:
            return show(lesson, words, job, found)
    if lesson.trials and not lesson.trials[0][0]:
        return show(lesson, "", lesson.trials[0][1], found)
    return show(lesson, "", None, search(lesson.mutation))


def trial(mutation: Mutation, job: comparison.Job) -> Any:
    """What the check measures under the mutation, on rank 0, or the exception that it ends with."""
    with mutated(mutation):
        try:
            return rd.run(lambda comm: comparison.measure(comm, job), ranks=job.plan.world_size)[0]
        except Exception as error:
            return error


def search(mutation: Mutation) -> BaseException:
    """What the property test of the mutation's room ends with, drawing that room alone."""
    try:
        from refdist.testing.properties import notices
    except ImportError:
        raise rd.ConfigError("only the property test shows this one; `pip install 'refdist[test]'` brings its needs") from None
    error = notices(mutation)
    return error if error is not None else AssertionError("the property test has not noticed it")


def print_list(lesson: Lesson) -> None:
    """Names, axes and reports; or hashes alone."""
    for entry in MUTATIONS if lesson.words == "list" else sorted(MUTATIONS, key=lambda entry: entry.key):
        if lesson.words == "hashes":
            print(json.dumps({"hash": entry.key}) if lesson.json else entry.key)
        elif lesson.json:
            print(json.dumps(described(entry)))
        else:
            print(f"{entry.name:<58} {', '.join(entry.axes):<24} {REPORTS.get(entry.report, '')}".rstrip())


def described(mutation: Mutation) -> dict[str, Any]:
    """A mutation as JSON."""
    return {"name": mutation.name, "hash": mutation.key, "axes": list(mutation.axes), "report": REPORTS.get(mutation.report),
            "diff": mutation.diff()}


def print_mutation(lesson: Lesson) -> None:
    """What is changed, unless that is the question."""
    mutation = lesson.mutation
    assert mutation is not None
    if lesson.hidden:
        print(f"mutation {mutation.key}: one function of refdist is wrong now; which one is the question", flush=True)
        return
    print(f"mutation {mutation.name}\nreport   {REPORTS.get(mutation.report, 'none: a mistake of our own making')}\n"
          f"found by draws of {', or of '.join(mutation.axes)} alone\n\n{mutation.diff()}", flush=True)


def show(lesson: Lesson, words: str, job: comparison.Job | None, found: Any) -> int:
    """Print what has been found; the exit status."""
    assert lesson.mutation is not None
    failed = isinstance(found, BaseException)
    if lesson.json:
        what = {"hash": lesson.mutation.key} if lesson.hidden else described(lesson.mutation)
        result = {"ok": False, "error": f"{type(found).__name__}: {found}"} if failed else comparison.as_json(*found)
        print(json.dumps({"mutation": what, "options": words, **result}), flush=True)
        return 0 if result["ok"] else 1
    if words:
        print(f"$ refdist check {words}", flush=True)
    if job is None:
        print(f"a step's gradients do not show it under the plans that were tried; the property test ends with\n"
              f"{first_lines(found)}", flush=True)
    elif failed:
        print(f"the run ends with {first_lines(found)}", flush=True)
    else:
        rows, loss_error, ok = found
        worst = dict(sorted(rows.items(), key=lambda item: item[1].ok)[:SHOWN])
        console = make_console()
        console.width = max(100, console.width)
        console.print(comparison.table_of(worst))
        if len(rows) > len(worst):
            print(f"… {len(rows) - len(worst)} more")
        print(comparison.verdict_on(rows, loss_error, job.precision))
        print(of_ratios(rows) if not ok else "this plan does not show the mutation", flush=True)
        return 0 if ok else 1
    return 1


def first_lines(error: BaseException) -> str:
    """What an error says, at not too great a length."""
    lines = f"{type(error).__name__}: {error}".splitlines()
    return "\n".join(lines[:LINES] + ["…"] * (len(lines) > LINES))


def of_ratios(rows: dict[str, comparison.Row]) -> str:
    """The ratio parallel/single of the gradients that differ, or its range."""
    ratios = [row.ratio for row in rows.values() if not row.ok]
    if not ratios:
        return "all gradients are right: the loss is wrong"
    if max(ratios) - min(ratios) < 1e-6 * max(abs(ratio) for ratio in ratios):
        return f"parallel/single = {ratios[0]:.6g} in each of the {len(ratios)} that differ"
    return f"parallel/single from {min(ratios):.6g} to {max(ratios):.6g} in the {len(ratios)} that differ"
