"""`phase-parallel status` and `phase-parallel logs`: the running launches of this user, their ranks, and what the ranks wrote last."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

from ..parallel.rank_logs import last_lines
from ..parallel.rank_words import error_lines, group_words, memory_words, phase_words, picture_words, text_words
from .errors import LaunchError
from .http_json import Refused, get_json
from .readiness import STATUS_ROUTE, answers
from .records import LaunchRecord, RankEntry, live_records, logs_of

PLACES = ("rank", "port", "process", "answers", "device", "shard", "replica", "AR", "denoise")
WORK = ("rank", "phase", "last text", "last picture", "memory")
NONE_RUNNING = "No launch of this user is running; start one with `phase-parallel up`."


def status() -> int:
    """Prints the tables. Exit code: 0 when every rank of every launch answers (or there is none), else 1."""
    records = live_records()
    if not records:
        print(NONE_RUNNING)
        return 0
    healthy = True
    for record in records:
        plan, reports = rank_reports(record)
        alive = {entry.rank: answers(entry.url(record)) for entry in record.ranks}
        healthy = healthy and all(alive.values())
        print(
            f"{record.url}  {record.state}, {len(record.ranks)} ranks on {record.device}, "
            f"ComfyUI {record.comfyui}, restarts {record.restarts}"
        )
        print(f"  checkout {record.checkout}, folder {record.base}, process {record.pid}")
        print(f"  plan {plan or 'none yet: no model has been loaded'}")
        print(table(PLACES, [place_row(entry, alive[entry.rank], reports.get(entry.rank)) for entry in record.ranks]))
        if reports:
            print(table(WORK, [work_row(reports[rank]) for rank in sorted(reports)]))
        for line in error_lines(reports.values()):
            print(f"  {line}")
    return 0 if healthy else 1


def logs(rank: int | None, lines: int) -> int:
    """Prints the last lines of one rank, or of all, of every launch of this user, each behind its rank. Raises LaunchError for a rank that no
    launch has.
    """
    records = live_records()
    if not records:
        print(NONE_RUNNING)
        return 0
    if rank is not None and not any(rank == entry.rank for record in records for entry in record.ranks):
        raise LaunchError(f"No running launch has a rank {rank} on this machine; the largest has {max(len(record.ranks) for record in records)} ranks.")
    for record in records:
        if len(records) > 1:
            print(record.url)
        for place, entry in enumerate(record.ranks):
            if rank in (None, entry.rank):
                for line in last_lines(logs_of(record), place, lines):
                    print(f"[rank {entry.rank}] {line}")
    return 0


def rank_reports(record: LaunchRecord) -> tuple[str, dict[int, dict[str, Any]]]:
    """The plan, and what each rank last told the others about itself; empty while rank 0 does not answer."""
    try:
        found = get_json(record.url + STATUS_ROUTE)
        return found["plan"], {report["rank"]: report for report in found["ranks"] if report is not None}
    except (OSError, ValueError, KeyError, Refused):
        return "", {}


def place_row(entry: RankEntry, alive: bool, report: dict[str, Any] | None) -> list[str]:
    words = [str(entry.rank), str(entry.port), str(entry.pid or "-"), "yes" if alive else "NO"]
    if report is None:
        return [*words, *["-"] * (len(PLACES) - len(words))]
    places = [str(report["place"].get(name, "-")) for name in ("shard", "replica")]
    return [*words, report["device_name"] or report["device"], *places, group_words(report, "AR") or "-", group_words(report, "denoise") or "-"]


def work_row(report: dict[str, Any]) -> list[str]:
    cells = (phase_words(report), text_words(report), picture_words(report), memory_words(report))
    return [str(report["rank"]), *(cell or "-" for cell in cells)]


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, two spaces in front and between."""
    lines = [list(headings), *map(list, rows)]
    widths = [max(columns(line[column]) for line in lines) for column in range(len(headings))]
    padded = ([cell + " " * (width - columns(cell)) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("  " + "  ".join(line).rstrip() for line in padded)


def columns(text: str) -> int:
    """Columns of a terminal: a Chinese sign takes two."""
    return sum(2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in text)
