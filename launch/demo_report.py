"""What the mini demo shows at its end: a table of the pictures, the seconds of each phase, the contact sheet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..train.contact_sheet import Entry, contact_sheet
from ..train.demo_wishes import DemoWish
from ..train.judge import Verdict, tell
from .status import table

SHEET = "contact_sheet.png"


@dataclass(frozen=True)
class Made:
    """What became of a wish. `graph`: name in workflows/api; `sources` and `pixels`: uint8 `[H, W, 3]`; `digest`: of the last result, the same on all ranks."""

    wish: DemoWish
    graph: str
    sources: tuple[np.ndarray, ...]
    pixels: np.ndarray
    file: Path
    verdict: Verdict
    digest: str
    seconds: float


def wish_lines(made: Sequence[Made]) -> str:
    """For each picture what was asked for and what the judge saw. Not one wide table: what is seen in a wrong picture has no end."""
    lines = []
    for number, one in enumerate(made, start=1):
        word = "right" if one.verdict.score.exact else "WRONG"
        lines += [f"  {number} {word}  {one.wish.prompt}", f"           {one.verdict.sentence}"]
    return "\n".join(lines)


def digest_table(made: Sequence[Made]) -> str:
    """How long each picture took, and the digest of its last result, which all ranks have."""
    rows = [(str(number), one.wish.title, one.graph, f"{one.seconds:.1f}", one.digest) for number, one in enumerate(made, start=1)]
    return table(("", "way", "graph", "seconds", "digest on every rank"), rows)


def phase_table(seconds: Mapping[str, float], *, started: float, drawn: float) -> str:
    """Seconds of the phases, all pictures together. `drawn`: from the first request to the last answer."""
    phases = {"start of the ranks": started, **seconds, "everything else": drawn - sum(seconds.values()), "all in all": started + drawn}
    return table(("phase", "seconds"), [(name, f"{value:.2f}") for name, value in phases.items()])


def save_sheet(made: Sequence[Made], output: Path, *, title: str) -> Path:
    """In place of that of an earlier run."""
    entries = [
        Entry(one.pixels, one.wish.meaning, one.wish.language, one.wish.title, tell(one.verdict.sight), one.verdict.score.exact, one.sources) for one in made
    ]
    contact_sheet(entries, title).save(output / SHEET)
    return output / SHEET
