"""The files of ``phase-parallel bench article``: what was measured, what failed, and what is missing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .article_parts import PARTS, Call, Setting
from .errors import BenchError

BLOCK = "article"
"""Of a result: part, name, title, command, seconds, repeats, and the setting of the run."""
FAILED = "failed"


@dataclass(frozen=True)
class Results:
    """By name of the call: results, and sentences of calls that failed."""

    found: dict[str, dict[str, Any]]
    failed: dict[str, str]
    setting: Setting

    def of_part(self, part: str) -> list[str]:
        """Names in the page's order."""
        return [call.name for call in PARTS[part](self.setting) if call.name in self.found]

    def missing(self, part: str) -> list[tuple[Call, str]]:
        """Calls without a result, and why."""
        return [(call, self._why(call)) for call in PARTS[part](self.setting) if call.name not in self.found]

    def _why(self, call: Call) -> str:
        if call.needs > self.setting.ranks:
            return f"needs {call.needs} ranks"
        return f"failed: {self.failed[call.name]}" if call.name in self.failed else "not measured yet"

    def rows(self, name: str, key: str = "rows") -> list[dict[str, Any]]:
        """Of a result, without those that were not run; none where there is no result."""
        return [row for row in self.found.get(name, {}).get(key, []) if "not_run" not in row]

    @property
    def measured(self) -> list[dict[str, Any]]:
        """Results of measurements, in the page's order."""
        return [self.found[name] for part in PARTS if part != "published" for name in self.of_part(part)]


def read_results(folder: Path) -> Results:
    """Of other JSON files in ``folder`` nothing is read. Raises BenchError for a file of a call that is damaged."""
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    names = {call.name for part in PARTS.values() for ranks in (2, 4) for call in part(Setting(ranks, "cpu", True))}
    for name in sorted(names):
        for file in (folder / f"{name}.json", folder / f"{name}.failed.json"):
            if file.is_file():
                result = _read(file)
                if FAILED in result:
                    failed[name] = result[FAILED]
                else:
                    found[name] = result
    return Results(found, failed, _setting_of(folder, found, failed))


def _read(file: Path) -> dict[str, Any]:
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        if {"part", "name", "ranks", "device", "small"} <= set(result[BLOCK]):
            return result
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BenchError(f"{file} cannot be read as a result of bench article ({error!r}); remove it, and the part is measured again.") from error
    raise BenchError(f"{file} is no result of bench article; remove it, and the part is measured again.")


def _setting_of(folder: Path, found: dict[str, dict[str, Any]], failed: dict[str, str]) -> Setting:
    """That of all of them: a run refuses to mix."""
    names = [folder / f"{name}.json" for name in found] + [folder / f"{name}.failed.json" for name in failed]
    if not names:
        return Setting(4, "cuda", False)
    block = _read(names[0])[BLOCK]
    return Setting(block["ranks"], block["device"], block["small"])
