"""From rows to figures: shares in per cent of a suite, of each language and of each kind of edit, and what they should be. Imports its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields

from .evaluation import Row
from .judge import Score
from .suites import Suite

Figures = dict[str, float | None]
ATTRIBUTES = tuple(field.name for field in fields(Score))
MAIN: dict[Suite, str] = {"t2i": "attributes", "think": "agreement", "ratio": "ratio", "edit1": "attributes", "edit2": "attributes", "distil": "attributes"}
"""The figure that a suite is about."""
GOALS: dict[Suite, float | None] = {"t2i": 95.0, "think": 95.0, "ratio": 95.0, "edit1": 90.0, "edit2": 90.0, "distil": None}
"""What it should reach; `distil` is compared with 50 steps."""
LANGUAGE_GOAL = 3.0
"""English and Chinese may be so many points apart."""


def figures(rows: Sequence[Row]) -> Figures:
    """Means in per cent; None where no row has such a figure. `attributes`, `recaption` and `agreement` are means over the six attributes, `exact` and
    `… exact` the shares of rows in which all six are right; `ratio` is the share of sizes chosen rightly, `done` that of edits."""
    values: dict[str, list[float | bool | None]] = {}
    for name in ("picture", "recaption", "agreement"):
        scores: list[Score | None] = [getattr(row, name) for row in rows]
        title = "attributes" if name == "picture" else name
        values[title] = [None if score is None else score.total for score in scores]
        values["exact" if name == "picture" else f"{name} exact"] = [None if score is None else score.exact for score in scores]
    values |= {"ratio": [row.size_right for row in rows], "done": [row.done for row in rows]}
    for name in ATTRIBUTES:
        values[name] = [None if row.picture is None else asdict(row.picture)[name] for row in rows]
    return {name: _per_cent(found) for name, found in values.items()}


def grouped(rows: Sequence[Row]) -> dict[str, tuple[int, Figures]]:
    """Number of rows and figures: of all, of each language, and of each kind of edit in the order in which they come."""
    groups: dict[str, Callable[[Row], bool]] = {"all": lambda row: True}
    for language in dict.fromkeys(row.item.language for row in rows):
        groups[language] = lambda row, language=language: row.item.language == language
    for edit in dict.fromkeys(row.item.edit.name for row in rows if row.item.edit is not None):
        groups[edit] = lambda row, edit=edit: row.item.edit.name == edit
    chosen = {name: [row for row in rows if belongs(row)] for name, belongs in groups.items()}
    return {name: (len(members), figures(members)) for name, members in chosen.items()}


def language_gap(suite: Suite, rows: Sequence[Row]) -> float | None:
    """English minus Chinese, in points of the main figure; None where one of them is missing."""
    main = [figures([row for row in rows if row.item.language == language])[MAIN[suite]] for language in ("english", "chinese")]
    return None if None in main else main[0] - main[1]


def _per_cent(values: Iterable[float | bool | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return 100 * sum(known) / len(known) if known else None
