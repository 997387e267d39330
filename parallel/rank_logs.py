"""The last lines of what a rank wrote, from the files that the elastic agent keeps for each attempt. Standard library only."""

from __future__ import annotations

import re
from pathlib import Path

MAXIMUM_LINES = 500
LONGEST_TAIL = 1 << 18
"""Bytes read from the end of a file, however long its lines are."""
STREAMS = ("stdout", "stderr")
_ORDERS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Colours and other orders to a terminal. A log can hold text of strangers, such as a prompt's."""


def last_lines(logs: Path, rank: int, count: int) -> list[str]:
    """At most ``count`` lines (and never more than ``MAXIMUM_LINES``) of rank's newest attempt that wrote anything: of its output, then of its
    messages, to each of which half belongs where both are long. Empty for a rank that wrote nothing.
    """
    count = max(0, min(count, MAXIMUM_LINES))
    written, messages = (_tail(_newest(logs, rank, stream), count) for stream in STREAMS)
    room = max(count - len(messages), count // 2)
    written = written[-room:] if room else []
    messages = messages[-(count - len(written)) :] if count > len(written) else []
    return written + messages


def _newest(logs: Path, rank: int, stream: str) -> Path | None:
    """Of the attempts whose file is not empty."""
    found = [path for path in logs.glob(f"*/attempt_*/{rank}/{stream}.log") if path.stat().st_size]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _tail(path: Path | None, count: int) -> list[str]:
    if path is None:
        return []
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - LONGEST_TAIL))
        text = file.read(LONGEST_TAIL).decode(errors="replace")
    lines = text.removesuffix("\n").split("\n")
    # What stands before the first line break of a cut file is half a line.
    lines = lines[1:] if size > LONGEST_TAIL and len(lines) > 1 else lines
    return [_as_seen(line) for line in lines[-count:]] if count else []


def _as_seen(line: str) -> str:
    """A progress bar writes over its own line; the last state counts."""
    return _ORDERS.sub("", line.rstrip("\r").rpartition("\r")[2])
