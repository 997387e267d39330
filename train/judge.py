"""Scores a picture against the scene that it should show, attribute by attribute, and says so in a sentence. Imports numpy and its neighbours."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from itertools import permutations

import numpy as np

from .scenes import Scene, SceneObject
from .seeing import SeenObject, Sight, see

NAMED = ("kind", "colour", "size", "position")
MOST_SEEN = 6
"""Of more things than this only the first are compared; such a picture is wrong anyway."""

Pair = tuple[SceneObject | None, SeenObject | None]


@dataclass(frozen=True)
class Score:
    """Shares from 0 to 1. The first four count objects: missing and surplus ones are wrong in every attribute."""

    kind: float
    colour: float
    size: float
    position: float
    background: float
    count: float

    @property
    def total(self) -> float:
        """Mean of the six."""
        return sum(astuple(self)) / len(astuple(self))

    @property
    def exact(self) -> bool:
        """Whether everything is as it should be."""
        return all(share == 1 for share in astuple(self))


@dataclass(frozen=True)
class Verdict:
    """What was seen, how it scores, and a sentence for people."""

    sight: Sight
    score: Score
    sentence: str


def judge(pixels: np.ndarray, scene: Scene) -> Verdict:
    """Compare uint8 `[H, W, 3]` with a scene. Raises ValueError for another shape or dtype."""
    return compare(see(pixels), scene)


def compare(sight: Sight, scene: Scene) -> Verdict:
    """Compare what was seen with a scene."""
    pairs = _paired(scene, sight)
    score = score_pairs(pairs, background=sight.background == scene.background)
    return Verdict(sight, score, _sentence(scene, sight, pairs, score))


def score_pairs(pairs: list[Pair], *, background: bool) -> Score:
    """Score of wanted and seen objects, side by side; None stands for one that has no partner."""
    right = {name: sum(_agrees(*pair, name) for pair in pairs) / len(pairs) for name in NAMED}
    return Score(**right, background=float(background), count=float(all(wanted and seen for wanted, seen in pairs)))


def _agrees(wanted: SceneObject | None, seen: SeenObject | None, name: str) -> bool:
    return wanted is not None and seen is not None and getattr(wanted, name) == getattr(seen, name)


def _paired(scene: Scene, sight: Sight) -> list[Pair]:
    """The pairing with most attributes in agreement; of equals, the first in reading order. Things beyond MOST_SEEN stay alone."""
    compared, rest = sight.objects[:MOST_SEEN], sight.objects[MOST_SEEN:]
    length = max(len(scene.objects), len(compared))
    wanted = [*scene.objects, *[None] * (length - len(scene.objects))]
    seen = [*compared, *[None] * (length - len(compared))]
    orders = permutations(seen, len(scene.objects))
    best = max(orders, key=lambda order: sum(_agrees(*pair, name) for pair in zip(wanted, order, strict=False) for name in NAMED))
    taken = {id(thing) for thing in best if thing is not None}
    alone = [(None, thing) for thing in (*compared, *rest) if id(thing) not in taken]
    return [*zip(scene.objects, best, strict=True), *alone]


def as_told(scene: Scene) -> Sight:
    """A scene that somebody describes, as if it had been seen; nothing has a box."""
    nowhere = (0, 0, 0, 0)
    return Sight(scene.background, tuple(SeenObject(thing.kind, thing.colour, thing.size, thing.position, nowhere) for thing in scene.objects))


def tell(sight: Sight) -> str:
    """What was seen, in words."""
    if sight.background is None and not sight.objects:
        return "unclear: no plain background"
    things = ", ".join(_name(thing) for thing in sight.objects) or "nothing"
    return f"{things} on {sight.background or 'a background of unclear colour'}"


def _name(thing: SceneObject | SeenObject) -> str:
    words = [thing.size or "size unclear", thing.colour or "colour unclear", thing.kind or "shape unclear"]
    return f"{' '.join(words) if None not in (thing.size, thing.colour, thing.kind) else ' / '.join(words)} ({thing.position})"


def _sentence(scene: Scene, sight: Sight, pairs: list[Pair], score: Score) -> str:
    if score.exact:
        return f"As wanted: {tell(sight)}."
    faults = [_fault(wanted, seen) for wanted, seen in pairs]
    if not score.background:
        faults.append(f"the background should be {scene.background}")
    return f"Seen: {tell(sight)}; wrong: {'; '.join(fault for fault in faults if fault)}."


def _fault(wanted: SceneObject | None, seen: SeenObject | None) -> str:
    if wanted is None:
        return f"{_name(seen)} is too much" if seen is not None else ""
    if seen is None:
        return f"{_name(wanted)} is missing"
    wrong = [f"{name} {getattr(seen, name) or 'unclear'}" for name in NAMED if not _agrees(wanted, seen, name)]
    return f"{_name(wanted)} has {', '.join(wrong)}" if wrong else ""
