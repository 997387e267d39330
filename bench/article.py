"""``phase-parallel bench article``: the tables of one machine from one command, beside what others published.

Every call of another bench leaves a file; what is there is kept, so a run that was stopped goes on where it was. The page is made from the files alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import published
from .article_page import CURVES, article_page
from .article_parts import PARTS, Call, Setting, choose_parts, choose_ranks
from .article_results import BLOCK, FAILED, Results, read_results
from .denoise_plot import can_plot, plot
from .errors import BenchError
from .report import require_folder, write_result

__all__ = ["ArticleOptions", "choose_ranks", "measure", "render"]
PAGE = "article.md"
Bench = Callable[[list[str]], int]
"""``phase-parallel bench`` with these words, in this process; returns its exit code."""


@dataclass(frozen=True)
class ArticleOptions:
    out: Path
    parts: tuple[str, ...]
    again: bool
    minutes: float | None
    ranks: int
    device: str
    small: bool
    gib: float | None
    folder: Path | None

    @property
    def setting(self) -> Setting:
        return Setting(self.ranks, self.device, self.small, self.gib, self.folder)


def measure(options: ArticleOptions, bench: Bench) -> int:
    """Exit code: 0 when all that was to be done is done or left for the next call, 1 when something failed. Raises BenchError before anything starts."""
    parts = choose_parts(options.parts)
    require_folder(options.out)
    require_same_setting(options.out, options.setting)
    calls = [call for part in parts for call in PARTS[part](options.setting)]
    began, failed = time.monotonic(), 0
    try:
        for number, call in enumerate(calls, start=1):
            if call.needs > options.ranks or (is_done(options.out, call) and not options.again):
                continue
            if options.minutes is not None and time.monotonic() - began > 60 * options.minutes:
                print(f"== {call.name} and what follows is left for the next call", flush=True)
                break
            print(f"== {number} of {len(calls)}: {call.name}, {call.title}", flush=True)
            failed += not run_call(options, call, bench)
    finally:  # also of what was stopped
        if any(options.out.glob("*.json")):
            render(options.out)
    print(f"See {options.out / PAGE}")
    return 1 if failed else 0


def run_call(options: ArticleOptions, call: Call, bench: Bench) -> bool:
    """Whether it gave its file; else a file says why not, and the next run tries again."""
    raw, began = options.out / f".{call.name}.measured.json", time.monotonic()
    block = {**about(options, call), "date": time.strftime("%Y-%m-%d %H:%M")}
    try:
        result = _result_of(call, bench, raw)
    except RuntimeError as error:  # of the bench or of its ranks: the other parts go on
        print(f"phase-parallel: {error}", file=sys.stderr, flush=True)
        write_result({BLOCK: block, FAILED: in_one_line(str(error))}, failed_file(options.out, call))
        return False
    finally:
        raw.unlink(missing_ok=True)
    write_result({**result, BLOCK: {**block, "seconds": round(time.monotonic() - began, 1)}}, options.out / f"{call.name}.json")
    failed_file(options.out, call).unlink(missing_ok=True)
    return True


def in_one_line(words: str) -> str:
    """The sentence, and the last line of a log behind it, which names the cause."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return " ".join(dict.fromkeys((*lines[:1], *lines[-1:])))


def _result_of(call: Call, bench: Bench, raw: Path) -> dict[str, Any]:
    if not call.words:
        return published.result()
    code = bench([*call.words, "--out", str(raw)])
    if code != 0:
        raise BenchError(f"phase-parallel bench {' '.join(call.words)} ended with {code}")
    return json.loads(raw.read_text(encoding="utf-8"))


def about(options: ArticleOptions, call: Call) -> dict[str, Any]:
    command = " ".join(("phase-parallel bench", *call.words)) if call.words else ""
    return {
        "part": call.part,
        "name": call.name,
        "title": call.title,
        "command": command,
        "repeats": call.repeats,
        "ranks": options.ranks,
        "device": options.device,
        "small": options.small,
    }


def failed_file(folder: Path, call: Call) -> Path:
    return folder / f"{call.name}.failed.json"


def is_done(folder: Path, call: Call) -> bool:
    """Raises BenchError for a file that is there and is no result."""
    return call.name in read_results(folder).found


def require_same_setting(folder: Path, setting: Setting) -> None:
    """One folder is of one setting: rows of two would stand in one table."""
    results = read_results(folder)
    for result in results.found.values():
        block = result[BLOCK]
        other = Setting(block["ranks"], block["device"], block["small"])
        if (other.ranks, other.device, other.small) != (setting.ranks, setting.device, setting.small):
            raise BenchError(f"{folder} holds results of {other.words()}; give another --out for {setting.words()}.")


def render(folder: Path) -> None:
    """Writes the page and the curves. Raises BenchError when there is nothing to write about, or no place for it."""
    if not folder.is_dir():
        raise BenchError(f"{folder} is no folder; give the one that `phase-parallel bench article --out DIR` wrote.")
    results = read_results(folder)
    if not results.found and not results.failed:
        raise BenchError(f"{folder} holds no results; run `phase-parallel bench article --out {folder}`.")
    require_folder(folder)
    page = article_page(results, drawn=draw_curves(folder, results))
    unfinished = folder / f".{PAGE}.unfinished"
    unfinished.write_text(page, encoding="utf-8")
    unfinished.replace(folder / PAGE)


def draw_curves(folder: Path, results: Results) -> str:
    """Empty when they are drawn, else why not."""
    files = [folder / f"{name}.json" for name in results.of_part("curves")]
    if not files:
        return "not measured yet"
    if not can_plot():
        return "matplotlib is not installed here: install it where you like and run `phase-parallel bench article --render DIR`"
    plot(files, folder / CURVES)
    return ""
