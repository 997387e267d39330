"""`phase-parallel status`: the running launches of this user and, for each, one line per rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .http_json import Refused, get_json
from .readiness import STATUS_ROUTE, answers
from .records import LaunchRecord, live_records

HEADINGS = ("rank", "port", "process", "answers", "phase", "step", "GB", "last error")


def status() -> int:
    """Prints the tables. Exit code: 0 when every rank of every launch answers (or there is none), else 1."""
    records = live_records()
    if not records:
        print("No launch of this user is running; start one with `phase-parallel up`.")
        return 0
    healthy = True
    for record in records:
        reports = rank_reports(record)
        alive = [answers(f"http://127.0.0.1:{entry.port}") for entry in record.ranks[1:]]
        alive.insert(0, answers(record.url))
        healthy = healthy and all(alive)
        print(
            f"{record.url}  {record.state}, {len(record.ranks)} ranks on {record.device}, "
            f"ComfyUI {record.comfyui}, restarts {record.restarts}"
        )
        print(f"  checkout {record.checkout}, folder {record.base}, process {record.pid}")
        rows = [row(record, rank, alive[rank], reports.get(rank)) for rank in range(len(record.ranks))]
        print(table(HEADINGS, rows))
    return 0 if healthy else 1


def rank_reports(record: LaunchRecord) -> dict[int, dict[str, Any]]:
    """What each rank last told the others about itself; empty while rank 0 does not answer."""
    try:
        found = get_json(record.url + STATUS_ROUTE)["ranks"]
    except (OSError, ValueError, KeyError, Refused):
        return {}
    return {report["rank"]: report for report in found if report is not None}


def row(record: LaunchRecord, rank: int, alive: bool, report: dict[str, Any] | None) -> list[str]:
    entry = record.ranks[rank]
    words = [str(rank), str(entry.port), str(entry.pid or "-"), "yes" if alive else "NO"]
    if report is None:
        return [*words, "-", "-", "-", "-"]
    step = f"{report['done']}/{report['total']}" if report["total"] else "-"
    memory = report["memory"].get("device_allocated", report["memory"].get("resident_set", 0))
    return [*words, report["phase"], step, f"{memory / 1e9:.1f}", report["error"] or "-"]


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, two spaces in front and between."""
    lines = [list(headings), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    return "\n".join("  " + "  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
