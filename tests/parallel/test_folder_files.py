"""Which files of a checkpoint folder are read; links are tried with whole checkpoints in test_checkpoint_damage.py."""

from __future__ import annotations

import os
from pathlib import Path

from phase_parallel.parallel.folder_files import why_not_read


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "generation_config.json")
    assert why_not_read(tmp_path / "generation_config.json").startswith("is not a file")


def test_a_file_and_an_absent_one_are_for_the_reader(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert why_not_read(tmp_path / "config.json", 2) == "" == why_not_read(tmp_path / "absent.json")
    assert why_not_read(tmp_path / "config.json", 1).startswith("is 0 MB, which no checkpoint")
