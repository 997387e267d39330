"""A place for the result is tried before anything is measured, and a result is whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from phase_parallel.bench import cli
from phase_parallel.bench.errors import BenchError
from phase_parallel.bench.report import require_writable, write_result
from phase_parallel.launch.cli import main

COMMANDS = ("ar", "denoise", "e2e", "faults", "load", "node", "vae")
SMALL = ["--device", "cpu", "--scale", "small", "--ranks", "2"]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("place", "sentence"), [("file/x.json", "nothing can be written into"), ("folder", "is a folder, and the result is a file")])
def test_a_bad_place_is_found_first(
    command: str, place: str, sentence: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_ar", "_denoise", "_e2e", "_faults", "_load", "_node", "_vae"):
        monkeypatch.setattr(cli, name, None)  # what would measure
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    small = [word for word in SMALL if command != "faults" or word not in ("--scale", "small")]
    assert main(["bench", command, *small, "--out", str(tmp_path / place)]) == 1
    said = capfd.readouterr().err
    assert sentence in said and said.count("\n") == 1


def test_bench_plot_looks_at_its_place_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "plot", str(tmp_path / "no.json"), "--out", str(tmp_path)]) == 1
    assert "is a folder, and the result is a file" in capfd.readouterr().err


def test_the_folder_is_made_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    require_writable(tmp_path / "a" / "b" / "x.json")
    assert (tmp_path / "a" / "b").is_dir() and not list((tmp_path / "a" / "b").iterdir())


def test_a_read_only_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "x.json"
    out.write_text("")
    monkeypatch.setattr("phase_parallel.bench.report.os.access", lambda path, mode: False)  # root may write into anything
    with pytest.raises(BenchError, match=r"x\.json cannot be written"):
        require_writable(out)


def test_what_cannot_be_written_leaves_the_old_result(tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    write_result({"a": 1}, out)
    with pytest.raises(TypeError):
        write_result({"a": object()}, out)
    assert out.read_text() == '{\n "a": 1\n}\n'
