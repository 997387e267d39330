from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from phase_parallel.launch import cli
from phase_parallel.launch.errors import LaunchError
from phase_parallel.launch.running import Launch
from phase_parallel.launch.up import UpOptions


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
