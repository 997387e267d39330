"""A launch and its terminal: what remains when the window is closed, and two launches that run side by side."""

from __future__ import annotations

import os
import pty
import signal
import time
from pathlib import Path

import pytest

from phase_parallel.launch.http_json import get_json
from phase_parallel.launch.paths import runtime_folder
from phase_parallel.launch.ports import free_port
from phase_parallel.launch.records import LaunchRecord, process_birth, read_record
from phase_parallel.launch.running import Launch, what_is_left

from .test_up import UP, wait_until_gone

GONE_S = 10.0


def ready(pid: int) -> LaunchRecord:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        record = read_record(pid)
        if record is not None and record.state == "ready":
            return record
        time.sleep(0.1)
    raise AssertionError("the launch did not become ready")


def reap(pid: int) -> None:
    deadline = time.monotonic() + GONE_S
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"the launcher outlived its terminal by {GONE_S} s")
        time.sleep(0.05)


def test_a_closed_terminal_leaves_nothing(stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing the window hangs up on the launcher, and from then on nothing can be written there."""
    monkeypatch.setenv("COMFYUI_DIR", str(stand_in))
    command = [*UP, "--ranks", "2", "--port", str(free_port()), "--base", str(tmp_path / "base")]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(command[0], command)
    try:
        record = ready(pid)
        start = time.monotonic()
    finally:
        os.close(terminal)
    reap(pid)
    assert wait_until_gone(record, GONE_S - (time.monotonic() - start)) == []
    assert list(runtime_folder().iterdir()) == []


def test_two_launches_do_not_disturb_each_other(stand_in: Path) -> None:
    environment = {"COMFYUI_DIR": str(stand_in)}
    with Launch(ranks=2, environment=environment) as first, Launch(ranks=2, plan="tp", environment=environment) as second:
        launches = (first, second)
        answers = [[get_json(url + "/system_stats")["environment"] for url in launch.urls] for launch in launches]
        for name in ("PORTS", "STORE", "SECRET", "LAUNCH_ID", "LOGS", "PLAN"):
            mine, others = ({answer[f"PHASE_PARALLEL_{name}"] for answer in each} for each in answers)
            assert len(mine) == len(others) == 1 and mine != others, name
        ports = [entry.port for launch in launches for entry in launch.record.ranks]
        assert len(set(ports)) == 4
        os.kill(first.pid, signal.SIGKILL)
        gone = [f"process {entry.pid}" for entry in first.record.ranks]
        deadline = time.monotonic() + GONE_S
        while set(gone) & set(what_is_left(first.record)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not set(gone) & set(what_is_left(first.record)), "the ranks of a killed launch go with it"
        # The next launch tidies up after the killed one, and touches nothing of the one that lives.
        with Launch(ranks=1, environment=environment):
            assert what_is_left(first.record) == []
        assert [process_birth(entry.pid) is not None for entry in second.record.ranks] == [True, True]
        assert [get_json(url + "/system_stats")["restart"] for url in second.urls] == ["0", "0"]
        assert read_record(second.pid) == second.record
