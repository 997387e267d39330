"""A rank's record in words, for the Ranks node and `phase-parallel status`. The page has its own, in web/ranks_view.js.

Imports the standard library only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

Record = dict[str, Any]


def place_words(record: Record) -> str:
    """``shard 0, replica 1; AR TP 1 of 4; denoise TP 0 of 2 × SP 1 of 2``; places count from 0."""
    if not record["place"]:
        return "no place yet"
    words = [f"shard {record['place']['shard']}, replica {record['place']['replica']}"]
    return "; ".join(words + [f"{phase} {group_words(record, phase)}" for phase, groups in record["groups"].items() if groups])


def group_words(record: Record, phase: str) -> str:
    """``TP 0 of 2 × SP 1 of 2``; empty where the rank works alone."""
    return " × ".join(f"{kind} {place} of {size}" for kind, (place, size) in record["groups"].get(phase, {}).items())


def phase_words(record: Record) -> str:
    """``denoise, step 4 of 50``: how many are done."""
    if not record["total"]:
        return record["phase"]
    return f"{record['phase']} {record['done']}/{record['total']}"


def memory_words(record: Record) -> str:
    """Used now, at most, and all there is: of the GPU where there is one, and of the process."""
    memory = record["memory"]
    host = f"{_gb(memory['resident_set'])} GB host memory (peak {_gb(memory['resident_peak'])})"
    if "device_total" not in memory:
        return f"{host} of {_gb(memory['host_total'])} GB"
    used = f"{_gb(memory['device_allocated'])} of {_gb(memory['device_total'])} GB on the GPU"
    return f"{used} (peak {_gb(memory['device_peak'])}, {_gb(memory['device_free'])} free), {host}"


def text_words(record: Record) -> str:
    """``101 tokens, 402.3 tokens/s`` of the last text; a text of one token has no speed. Empty without a text."""
    if not record["tokens"]:
        return ""
    count = f"{record['tokens']} token{'s' * (record['tokens'] > 1)}"
    return f"{count}, {record['tokens_per_s']:.1f} tokens/s" if record["tokens_per_s"] else count


def picture_words(record: Record) -> str:
    """``50 steps, 0.51 s/step`` of the last picture; empty without one."""
    if not record["s_per_step"]:
        return ""
    return f"{record['steps']} step{'s' * (record['steps'] > 1)}, {record['s_per_step']:.2f} s/step"


def moment(seconds: float) -> str:
    """Local time, with the day where it is another one."""
    then = time.localtime(seconds)
    today = time.localtime()[:3] == then[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S", then)


def error_lines(records: Iterable[Record]) -> list[str]:
    """Last errors, newest first: one line for ranks that met the same one (a fault is told alike by all)."""
    ranks: dict[str, list[int]] = {}
    latest: dict[str, float] = {}
    for record in records:
        if record["error"]:
            ranks.setdefault(record["error"], []).append(record["rank"])
            latest[record["error"]] = max(latest.get(record["error"], 0.0), record["error_at"])
    newest_first = sorted(latest, key=lambda error: -latest[error])
    return [f"last error of rank {', '.join(map(str, ranks[error]))} at {moment(latest[error])}: {error}" for error in newest_first]


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f}"
