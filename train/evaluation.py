"""Examines an engine: every item of a suite is written, drawn and judged, and becomes a row of figures. Every rank calls alike, rank 0 judges.

Imports numpy and its neighbours.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .captions import CaptionError, parse_recaption, recaption
from .judge import NAMED, Score, as_told, compare, judge, tell
from .painter import Painter, Written
from .scenes import Scene, SceneObject, size_of
from .seeing import Sight
from .suites import WRITES_ONLY, Item

NOTHING_RIGHT = Score(0, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Row:
    """One item. Scores are of: the picture against the wish, the recaption against the wish, the picture against the recaption; None where one of the
    two does not exist. `size_right`: whether the model chose the size of the wanted aspect, None where it was given. `done`: whether what an edit
    asked for is there, None where nothing was edited."""

    item: Item
    written: Written
    wanted: str
    seen: str
    sentence: str
    picture: Score | None
    recaption: Score | None
    agreement: Score | None
    size_right: bool | None
    done: bool | None
    seconds: float

    def to_json(self) -> dict[str, Any]:
        wish = self.item.wish
        scores = {name: _score_json(getattr(self, name)) for name in ("picture", "recaption", "agreement")}
        return {
            "suite": self.item.suite,
            "number": self.item.number,
            "language": self.item.language,
            "edit": None if self.item.edit is None else self.item.edit.name,
            "prompt": wish.prompt,
            "seed": wish.seed,
            "wanted": self.wanted,
            "seen": self.seen,
            "sentence": self.sentence,
            "text": self.written.cot_text,
            "size": list(self.written.size),
            "size_right": self.size_right,
            "done": self.done,
            "score": scores,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class Outcome:
    """Of one suite on this rank. `rows` only where there is a judge; `pictures` uint8 `[H, W, 3]`, None for suites that draw none; `digest` over all
    texts and pictures, equal on all ranks."""

    rows: tuple[Row, ...]
    pictures: tuple[np.ndarray | None, ...]
    digest: str


def evaluate(painter: Painter, items: Sequence[Item], *, judging: bool, report: Callable[[Row], None] = lambda row: None) -> Outcome:
    """All items, one after the other. `report` sees each row as it is made."""
    rows, pictures, digest = [], [], hashlib.sha256()
    for item in items:
        began = time.perf_counter()
        written = painter.write(item.wish)
        pixels = None if item.suite in WRITES_ONLY else painter.draw(item.wish, written)
        digest.update(f"{written}".encode() + (b"" if pixels is None else pixels.tobytes()))
        pictures.append(pixels)
        if judging:
            rows.append(mark(item, written, pixels, seconds=time.perf_counter() - began))
            report(rows[-1])
    return Outcome(tuple(rows), tuple(pictures), digest.hexdigest()[:32])


def mark(item: Item, written: Written, pixels: np.ndarray | None, *, seconds: float = 0.0) -> Row:
    """What an item has become, compared with what it should be."""
    verdict = None if pixels is None else judge(pixels, item.wanted)
    told, why_not = _read(item, written)
    writes = item.wish.task != "image"
    agreement = None
    if writes and verdict is not None:
        agreement = NOTHING_RIGHT if told is None else compare(verdict.sight, told).score
    return Row(
        item=item,
        written=written,
        wanted=recaption(item.wanted, "english"),
        seen="" if verdict is None else tell(verdict.sight),
        sentence=" ".join(text for text in ("" if verdict is None else verdict.sentence, why_not) if text),
        picture=None if verdict is None else verdict.score,
        recaption=None if not writes else NOTHING_RIGHT if told is None else compare(as_told(told), item.wanted).score,
        agreement=agreement,
        size_right=None if item.wish.size is not None else written.size == size_of(item.wanted.aspect),
        done=None if item.edit is None or verdict is None else edit_done(item, verdict.sight),
        seconds=seconds,
    )


def edit_done(item: Item, sight: Sight) -> bool:
    """Whether what the wish names is so, whatever else the picture shows: a picture that was left as it was has not been edited."""
    edit = item.edit
    assert edit is not None
    if edit.after is not None:
        gone = edit.before is None or edit.before == edit.after or not _seen(edit.before, sight)
        return _seen(edit.after, sight) and gone
    if edit.before is not None:
        return not _seen(edit.before, sight) and len(sight.objects) == len(edit.result.objects)
    return sight.background == edit.result.background


def _seen(thing: SceneObject, sight: Sight) -> bool:
    return any(all(getattr(thing, name) == getattr(seen, name) for name in NAMED) for seen in sight.objects)


def _read(item: Item, written: Written) -> tuple[Scene | None, str]:
    """The scene of the recaption, or why there is none."""
    if item.wish.task == "image":
        return None, ""
    try:
        return parse_recaption(written.recaption), ""
    except CaptionError as error:
        return None, f"The recaption cannot be read: {error}"


def _score_json(score: Score | None) -> dict[str, Any] | None:
    return None if score is None else asdict(score) | {"total": score.total, "exact": score.exact}
