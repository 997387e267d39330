"""The ends of the ranks' logs."""

from __future__ import annotations

import os
from pathlib import Path

from phase_parallel.parallel.rank_logs import LONGEST_TAIL, MAXIMUM_LINES, last_lines


def write(logs: Path, attempt: int, rank: int, stream: str, text: str) -> Path:
    path = logs / "launch_x" / f"attempt_{attempt}" / str(rank) / f"{stream}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (attempt + 1, attempt + 1))
    return path


def test_newest_attempt_that_wrote_anything(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, "stderr", "old\n")
    write(tmp_path, 1, 1, "stderr", "new\n")
    write(tmp_path, 2, 1, "stderr", "")
    write(tmp_path, 1, 0, "stderr", "of another rank\n")
    assert last_lines(tmp_path, 1, 10) == ["new"]
    assert last_lines(tmp_path, 2, 10) == []


def test_output_and_messages_share_the_lines(tmp_path: Path) -> None:
    write(tmp_path, 0, 0, "stdout", "".join(f"o{number}\n" for number in range(9)))
    write(tmp_path, 0, 0, "stderr", "".join(f"e{number}\n" for number in range(9)))
    assert last_lines(tmp_path, 0, 4) == ["o7", "o8", "e7", "e8"]
    assert len(last_lines(tmp_path, 0, 100)) == 18
    write(tmp_path, 0, 0, "stdout", "o\n")
    assert last_lines(tmp_path, 0, 4) == ["o", "e6", "e7", "e8"]
    assert last_lines(tmp_path, 0, 0) == []


def test_a_huge_log_is_read_from_its_end(tmp_path: Path) -> None:
    path = write(tmp_path, 0, 0, "stderr", "x" * (3 * LONGEST_TAIL) + "\nlast\n")
    assert last_lines(tmp_path, 0, 5) == ["last"]
    path.write_bytes(b"\xff\n" * 3000)
    lines = last_lines(tmp_path, 0, 10**9)
    assert len(lines) == MAXIMUM_LINES and set(lines) == {"�"}


def test_lines_are_as_a_person_saw_them(tmp_path: Path) -> None:
    bar = "\r".join(f"{done}%" for done in range(0, 101, 10))
    write(tmp_path, 0, 0, "stderr", f"\x1b[32m[INFO]\x1b[0m a\tb\n{bar}\r\n\x1b]0;title\x07ring\x07 \x9b31mred\n\nlast")
    assert last_lines(tmp_path, 0, 9) == ["[INFO] a\tb", "100%", "ring 31mred", "", "last"]
