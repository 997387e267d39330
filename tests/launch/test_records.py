from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from phase_parallel.launch.errors import LaunchError
from phase_parallel.launch.paths import make_run_folder, runtime_folder
from phase_parallel.launch.records import (
    LaunchRecord,
    RankEntry,
    live_records,
    only_launch_in,
    process_birth,
    read_record,
    record_path,
    remove_record,
)


def record(pid: int, born: int | None, run_folder: Path) -> LaunchRecord:
    return LaunchRecord(
        pid,
        born or 0,
        "id",
        "checkout",
        "base",
        str(run_folder),
        "1.0",
        "cpu",
        "url",
        ranks=[RankEntry(0, 1)],
    )


def test_a_record_comes_back_as_it_was_and_goes_with_its_folder() -> None:
    mine = record(os.getpid(), process_birth(os.getpid()), make_run_folder())
    mine.write()
    assert read_record(os.getpid()) == mine
    assert live_records() == [mine]
    remove_record(mine)
    assert live_records() == [] and not Path(mine.run_folder).exists()


def test_what_a_killed_launch_left_is_removed(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    dead = record(child.pid, 1, make_run_folder())
    dead.write()
    # The same pid, born at another time, is another process.
    recycled = record(os.getpid(), 1, tmp_path)
    recycled.write()
    assert live_records() == []
    assert not Path(dead.run_folder).exists() and not record_path(child.pid).exists()
    assert tmp_path.exists(), "a folder that is not named like ours must stay"


def test_a_record_cannot_name_a_folder_elsewhere(tmp_path: Path) -> None:
    elsewhere = tmp_path / "phase_parallel_x"
    elsewhere.mkdir()
    assert elsewhere.parent != Path(tempfile.gettempdir())
    remove_record(record(os.getpid(), 1, elsewhere))
    assert elsewhere.exists()


def test_the_lock_refuses_a_second_launch_and_ends_with_the_first(tmp_path: Path) -> None:
    refused = pytest.raises(LaunchError, match=f"process {os.getpid()}.* already runs in")
    with only_launch_in(tmp_path), refused, only_launch_in(tmp_path):
        pass
    with only_launch_in(tmp_path):
        pass


def test_the_runtime_folder_must_be_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert runtime_folder().stat().st_mode & 0o077 == 0
    runtime_folder().chmod(0o755)
    with pytest.raises(LaunchError, match="does not belong to this user alone"):
        runtime_folder()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert runtime_folder().parent == tmp_path
