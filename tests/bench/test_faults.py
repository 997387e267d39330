"""``bench faults``: a real launch on two CPU ranks in which one is killed, and the parts of which that consists."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phase_parallel.bench import faults
from phase_parallel.bench.errors import BenchError
from phase_parallel.bench.faults import FaultOptions, prompt_of, require_recovery, wait_for_new_ranks
from phase_parallel.bench.release import SMALL, write_release
from phase_parallel.launch.cli import main

OPTIONS = FaultOptions("tp", 2, "cpu", 2, True)


@pytest.mark.host
@pytest.mark.timeout(900)
def test_a_rank_killed_while_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of both phases, which take minutes on a busy machine."""
    monkeypatch.setattr(faults, "PHASES", ("AR decode",))
    out = tmp_path / "faults.json"
    assert main(["bench", "faults", "--device", "cpu", "--ranks", "2", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    (row,) = result["rows"]
    assert result["collectives"] == "gloo" and (row["phase"], row["rank"], row["same_result"]) == ("AR decode", 1, True)
    assert row["sentence"].startswith("rank 1 failed in AR decode (token ") and "the process has ended" in row["sentence"]
    assert 0 < row["told_s"] < row["back_s"] < row["all_s"]


@pytest.mark.parametrize(("phase", "length"), [("AR decode", "max_new_tokens"), ("denoise", "steps")])
def test_a_prompt_can_be_short_or_long(phase: str, length: str, tmp_path: Path) -> None:
    built = write_release(tmp_path / "small", SMALL)
    prompt = prompt_of(phase, built, faults.TASKS[0], OPTIONS)
    graph = prompt.of(7, 3)
    assert (graph[prompt.node]["inputs"][length], graph[prompt.node]["inputs"]["seed"]) == (7, 3) and prompt.length == length


def test_a_rank_is_killed_once_at_its_place() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        killed: list[float] = []
        on_progress = faults._killer(process.pid, 8, killed)
        on_progress(4)
        assert process.poll() is None and not killed
        on_progress(8)
        assert process.wait(10) == -signal.SIGKILL and len(killed) == 1
        on_progress(12)
    assert len(killed) == 1


def statuses(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> None:
    left = list(answers)

    def answer(url: str) -> Any:
        found = left.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(faults, "read_status", answer)
    monkeypatch.setattr(faults, "POLL_S", 0.0)


def test_back_means_new_processes_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = [{"pid": 1}, {"pid": 2}], [{"pid": 3}, {"pid": 4}]
    statuses(monkeypatch, old, OSError(), [new[0], None], [new[0], old[1]], new, AssertionError("one look too many"))
    wait_for_new_ranks("", [1, 2])


def test_ranks_that_stay_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "BACK_S", 0.05)
    monkeypatch.setattr(faults, "read_status", lambda url: [None, None])
    with pytest.raises(BenchError, match="the ranks were not back"):
        wait_for_new_ranks("", [1, 2])


def test_another_result_is_an_error() -> None:
    row = {"rank": 1, "phase": "denoise", "same_result": True}
    require_recovery({"rows": [row]})
    with pytest.raises(BenchError, match="after rank 1 was killed in denoise the next prompt had another result"):
        require_recovery({"rows": [{**row, "same_result": False}]})


def test_one_rank_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "faults", "--device", "cpu"]) == 1
    assert "kills one of several ranks" in capfd.readouterr().err
