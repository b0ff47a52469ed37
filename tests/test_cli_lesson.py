"""`refdist check --mutate`: what is changed and what becomes wrong; with a hash, only what becomes wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from refdist.cli import lesson
from refdist.cli.launch import Launched
from refdist.cli.main import main
from refdist.testing.mutations import MUTATIONS, find

ROOT = Path(__file__).parent.parent
AVERAGED = "data/gradients_averaged_over_ranks_again"


def test_a_name_shows_the_change_the_report_and_the_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    original = find(AVERAGED).function().__code__
    assert main(["check", "--mutate", AVERAGED]) == 1
    out = capsys.readouterr().out
    assert "+++ refdist/parallel/replica.py" in out
    assert re.search(r"^\+ +batch.scale = .* / self.plan.dp$", out, re.MULTILINE)
    assert "https://github.com/meta-pytorch/torchtune/issues/2172" in out
    assert "$ refdist check --dp 2\n" in out
    assert "parallel/single = 0.5 in each of the 21 that differ" in out
    assert find(AVERAGED).function().__code__ is original
    assert main(["check", "--dp", "2", "--in-process"]) == 0  # and nothing is broken any more


def test_a_plan_of_ones_own_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--mutate", AVERAGED, "--dp", "5", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["mutation"]["name"] == AVERAGED
    assert {round(row["ratio"], 9) for row in result["parameters"].values()} == {0.2}
    assert main(["check", "--mutate", "data/tie_is_lost", "--dp", "2"]) == 0
    assert "this plan does not show the mutation" in capsys.readouterr().out
    assert main(["check", "--mutate", "data/tie_is_lost", "--dp", "2", "--micro-batches", "2", "--tie-word-embeddings"]) == 1
    wrong = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.endswith("DIFFERS")]
    assert wrong == ["model.embed_tokens.weight"]


def test_a_hash_does_not_give_the_answer_away(capsys: pytest.CaptureFixture[str]) -> None:
    key = find(AVERAGED).key
    for words in ([key], [key, "--json"], [key[:5]]):
        assert main(["check", "--mutate", *words]) == 1
        out = capsys.readouterr().out
        assert not [word for word in (AVERAGED, "averaged", "torchtune", "replica.py", "batch.scale") if word in out]
        assert key in out
    assert main(["check", "--mutate", "hashes"]) == 0
    assert capsys.readouterr().out.split() == sorted(entry.key for entry in MUTATIONS)


def test_the_list_has_every_mutation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--mutate", "list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [entry.name for entry in MUTATIONS]


def test_what_no_gradient_shows_the_property_test_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--mutate", "optimizer/never_clipped"]) == 1
    out = capsys.readouterr().out
    assert "the property test ends with\nAssertionError: " in out
    assert "parallel/single" in out


def test_a_run_that_ends_with_an_error_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--mutate", "pipeline/warm_up_longer_than_the_batch"]) == 1
    assert "the run ends with PlanError: the schedule 1f1b is wrong" in capsys.readouterr().out


def test_errors_of_use(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--mutate", "data/gradients_averaged"]) == 2
    assert capsys.readouterr().err == ("refdist check: --mutate data/gradients_averaged: there is no such mutation; "
                                       f"`--mutate list` prints them; perhaps {AVERAGED}\n")
    assert main(["check", "--mutate", AVERAGED, "--dp", "9"]) == 2
    assert "a batch of 8 sequences" in capsys.readouterr().err
    monkeypatch.setattr(lesson, "launched", lambda environ: Launched("mpirun", 0, 2))
    with pytest.raises(ValueError, match="without mpirun"):
        lesson.prepare(lesson.argparse.Namespace(mutate=AVERAGED))


@pytest.mark.parametrize("room", sorted({entry.name.split("/")[0] for entry in MUTATIONS}))
def test_a_diff_numbers_the_lines_of_the_file(room: str) -> None:
    for entry in [entry for entry in MUTATIONS if entry.name.startswith(room + "/")]:
        header, *hunks = re.split(r"^(?=@@)", entry.diff(), flags=re.MULTILINE)
        path = header.split()[1]
        lines = (ROOT / path).read_text().splitlines()
        assert hunks
        for hunk in hunks:
            place, *body = hunk.splitlines()
            first = int(re.match(r"@@ -(\d+)", place)[1])  # type: ignore[index]
            before = [line[1:] for line in body if line[0] in " -"]
            assert lines[first - 1:first - 1 + len(before)] == before
        changed = "\n".join(line[1:] for hunk in hunks for line in hunk.splitlines()[1:] if line[0] in " +")
        assert entry.new.splitlines()[0].strip() in changed
