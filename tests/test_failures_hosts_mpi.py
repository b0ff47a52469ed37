"""Two hosts without a shared file: two network namespaces with names of their own, joined by a cable; needs root."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mpirun import PROMISED, find_runtime, run_limited

from refdist.testing.faults import RANKS, find

SCRIPT = Path(__file__).parent / "mpi" / "faults_in_epochs.py"
NAMES = (f"rd-one-{os.getpid()}", f"rd-two-{os.getpid()}")
ADDRESSES = ("10.231.77.1", "10.231.77.2")

AGENT = """#!/bin/sh
# stands for ssh: agent [options] HOST COMMAND…
while [ "${1#-}" != "$1" ]; do shift; done
case "$1" in %s) name=%s ;; *) name=%s ;; esac
shift
exec ip netns exec $name unshare --uts sh -c "hostname $name; cd /; $*"
"""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


def _remove() -> None:
    for name in NAMES:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=20)


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The start of a command line that runs two ranks on each of two hosts."""
    runtime = find_runtime()
    if runtime.kind not in ("Open MPI", "MPICH"):
        pytest.skip(f"needs Open MPI or MPICH: {runtime}")
    if not all(shutil.which(tool) for tool in ("ip", "unshare", "hostname")):
        pytest.skip("needs ip, unshare and hostname")
    _remove()
    try:
        for name in NAMES:
            _ip("netns", "add", name)
        _ip("link", "add", "rd-a", "netns", NAMES[0], "type", "veth", "peer", "name", "rd-b", "netns", NAMES[1])
        for name, address, device in zip(NAMES, ADDRESSES, ("rd-a", "rd-b"), strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            for link in ("lo", device):
                _ip("-n", name, "link", "set", link, "up")
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        _remove()
        pytest.skip(f"may not make network namespaces: {getattr(error, 'stderr', error)}")
    agent = tmp_path_factory.mktemp("hosts") / "agent"
    agent.write_text(AGENT % (ADDRESSES[0], *NAMES))
    agent.chmod(0o755)
    hosts = ",".join(f"{address}:{RANKS // 2}" for address in ADDRESSES)
    if runtime.kind == "Open MPI":
        flags = ["--allow-run-as-root", "--host", hosts, "--prtemca", "plm_ssh_agent", str(agent), "--bind-to", "none",
                 "--map-by", ":OVERSUBSCRIBE"]
    else:
        flags = ["-launcher", "ssh", "-launcher-exec", str(agent), "-hosts", hosts]
    inside = ["ip", "netns", "exec", NAMES[0], "unshare", "--uts", "sh", "-c", f'hostname {NAMES[0]}; exec "$@"', "sh"]
    new = f"TMPDIR={tmp_path_factory.mktemp('session')}"  # for the files of an mpirun that is killed
    yield [*inside, "env", new, runtime.mpirun, *flags, "-n", str(RANKS), sys.executable]
    _remove()


ENVIRONMENT = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}


def test_faults_are_found_and_the_next_example_is_clean(two_hosts: list[str]) -> None:
    names = ["another order of calls", "one rank has one batch less", "one rank raises", "every rank receives first",
             "a message that nobody receives", "two stages wait for each other while others work"]
    done = run_limited([*two_hosts, str(SCRIPT), "messages", *names], 200, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report.pop("epoch") == 2 * len(names)
    for name, seen in report.items():
        errors = [kind for kind, _ in seen["errors"] if kind != "PeerFailed"]
        assert seen["left_over"] if find(name).says == "left over" else errors, (name, seen)
        assert all(re.fullmatch(find(name).error, kind) for kind in errors), (name, seen)
        assert seen["seconds"] < PROMISED, (name, seen)


def test_the_job_ends(two_hosts: list[str]) -> None:
    name = "every rank receives first"
    done = run_limited([*two_hosts, "-m", "refdist.testing.faults", "--run", name], 120, env=ENVIRONMENT)
    begun = max(float(stamp) for stamp in re.findall(r"fault at (\d+\.\d+)", done.stdout))
    assert time.time() - begun < PROMISED
    assert done.returncode != 0
    assert len(re.findall(r"^refdist: rank \d+ of", done.stderr, re.MULTILINE)) == 1, done.stderr
    assert re.search(find(name).error, done.stderr)
