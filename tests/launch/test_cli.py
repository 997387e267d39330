from __future__ import annotations

import os
import sys
import types
from dataclasses import asdict
from pathlib import Path

import pytest

from phase_parallel.launch import cli
from phase_parallel.launch import status as status_module
from phase_parallel.launch.errors import LaunchError
from phase_parallel.launch.records import LaunchRecord, RankEntry, process_birth
from phase_parallel.launch.running import Launch
from phase_parallel.launch.up import UpOptions
from phase_parallel.parallel.rank_record import RankRecord
from phase_parallel.parallel.rank_words import moment


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[UpOptions]:
    """What `up` would have been called with."""
    calls: list[UpOptions] = []

    def up(options: UpOptions) -> int:
        calls.append(options)
        return 0

    monkeypatch.setattr("phase_parallel.launch.up.up", up)
    return calls


def test_up_hands_over_its_options(asked: list[UpOptions]) -> None:
    words = [
        "up",
        "--ranks",
        "2",
        "--plan",
        "tp",
        "--device",
        "cpu",
        "--port",
        "9000",
        "--model",
        "a",
        "--model",
        "b",
        "--restarts",
        "0",
    ]
    assert cli.main([*words, "--", "--listen", "--", "x"]) == 0
    assert asked == [
        UpOptions(
            ranks=2,
            plan="tp",
            device="cpu",
            port=9000,
            models=(Path("a"), Path("b")),
            restarts=0,
            comfy_flags=["--listen", "--", "x"],
        )
    ]


def test_defaults(asked: list[UpOptions]) -> None:
    assert cli.main(["up"]) == 0
    assert asked == [UpOptions()]


def test_an_error_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def up(options: UpOptions) -> int:
        raise LaunchError("the sentence")

    monkeypatch.setattr("phase_parallel.launch.up.up", up)
    assert cli.main(["up"]) == 1
    assert capsys.readouterr().err == "phase-parallel: the sentence\n"


def test_comfyui_flags_go_with_up_only(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["status", "--", "--listen"])
    assert stop.value.code == 2
    assert "go with `up`" in capsys.readouterr().err


def test_check_gets_its_arguments_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[list[str]] = []

    def check_main(words: list[str]) -> int:
        got.append(words)
        return 3

    fake = types.ModuleType("phase_parallel.launch.check")
    fake.main = check_main
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr("phase_parallel.launch.check", fake, raising=False)
    assert cli.main(["check", "folder", "--plan", "tp", "--ranks", "2"]) == 3
    assert cli.main(["check", "--help"]) == 3
    assert got == [["folder", "--plan", "tp", "--ranks", "2"], ["--help"]]


def test_status_without_and_with_a_launch(stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status"]) == 0
    assert "No launch of this user is running" in capsys.readouterr().out
    with Launch(ranks=2, environment={"COMFYUI_DIR": str(stand_in)}) as launch:
        assert cli.main(["status"]) == 0
        out = capsys.readouterr().out
        assert launch.url in out and "ready, 2 ranks on cpu" in out
        for entry in launch.record.ranks:
            assert f"{entry.rank}     {entry.port}" in out and str(entry.pid) in out
        assert cli.main(["logs", "--rank", "1", "--lines", "3"]) == 0
        out = capsys.readouterr().out
        assert "[rank 1] user " in out and "[rank 0]" not in out and len(out.splitlines()) <= 3
        assert cli.main(["logs"]) == 0
        out = capsys.readouterr().out
        assert "[rank 0] argv" in out and "[rank 1] argv" in out
        assert cli.main(["logs", "--rank", "2"]) == 1
        assert "No running launch has a rank 2" in capsys.readouterr().err


def test_logs_without_a_launch(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["logs"]) == 0
    assert "No launch of this user is running" in capsys.readouterr().out


def test_status_shows_what_each_rank_tells(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    mine = LaunchRecord(
        os.getpid(), process_birth(os.getpid()) or 0, "id", "checkout", "base", "/nowhere", "1.0", "cpu", "http://one", "ready",
        ranks=[RankEntry(0, 1001, 7), RankEntry(1, 1002)],
    )  # fmt: skip
    memory = {"resident_set": 10**9, "resident_peak": 2 * 10**9, "host_total": 24 * 10**9}
    told = asdict(RankRecord(0, 7, "here", "", "cpu", device_name="CPU", memory=memory, s_per_step=1.5, steps=3, error="it broke", error_at=0.0))
    told |= {"place": {"shard": 1, "replica": 0}, "groups": {"AR": {"TP": [1, 2]}, "denoise": {"TP": [1, 2]}}}
    monkeypatch.setattr(status_module, "live_records", lambda: [mine])
    monkeypatch.setattr(status_module, "answers", lambda url: url == "http://one")
    monkeypatch.setattr(status_module, "get_json", lambda url: {"plan": "tp: AR TP2", "ranks": [told, None]})
    assert cli.main(["status"]) == 1, "rank 1 does not answer"
    lines = capsys.readouterr().out.splitlines()
    assert "  plan tp: AR TP2" in lines
    assert lines[-6].split() == ["rank", "port", "process", "answers", "device", "shard", "replica", "AR", "denoise"]
    assert lines[-5] == "  0     1001  7        yes      CPU     1      0        TP 1 of 2  TP 1 of 2"
    assert lines[-4].split() == ["1", "1002", "-", "NO", *["-"] * 5]
    assert lines[-2] == "  0     idle   -          3 steps, 1.50 s/step  1.0 GB host memory (peak 2.0) of 24.0 GB"
    assert lines[-1] == f"  last error of rank 0 at {moment(0.0)}: it broke"
