"""What a picture of the mini model can hold: up to three coloured shapes on a plain background; which scenes are for training and which stay unseen.

Everything is decided by names and integer seeds. Lengths are shares of the picture's shorter side unless said otherwise. Imports the standard
library and the size table.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from random import Random

from ..models.hunyuan_image_3.resolution import ResolutionTable

RGB = tuple[int, int, int]

PALETTE: dict[str, RGB] = {
    "red": (205, 25, 40),
    "orange": (240, 125, 20),
    "yellow": (250, 228, 50),
    "green": (40, 160, 65),
    "blue": (35, 85, 215),
    "purple": (130, 30, 160),
    "black": (22, 22, 22),
    "white": (248, 248, 248),
    "grey": (140, 140, 140),
    "pink": (250, 155, 190),
    "cyan": (130, 215, 225),
}
KINDS = ("circle", "square", "triangle", "star", "ring", "cross")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "black", "white")
SIZES = ("small", "medium", "large")
POSITIONS = ("top left", "top", "top right", "left", "centre", "right", "bottom left", "bottom", "bottom right")
BACKGROUNDS = ("white", "black", "grey", "pink", "cyan")
MAX_OBJECTS = 3

BASE_SIZE = 256
ASPECT_ROWS = {"square": 16, "wide": 12, "tall": 20}
"""Row of the size table, which is the ratio token, of each aspect: 256 x 256, 192 x 320 and 320 x 192 (height x width)."""
ASPECTS = tuple(ASPECT_ROWS)

EXTENT = {"small": 0.165, "medium": 0.23, "large": 0.32}
"""The longer side of an object's bounding box."""
CENTRES = (0.19, 0.5, 0.81)
"""Centres of the grid's rows and columns, as shares of the side they lie along."""
PLACE_JITTER, SIZE_JITTER = 0.004, 0.012
"""A pixel each, about. With three times as much, two of three outlines were wrong after 11,500 steps: the network spent them on where edges lie."""
GAP = 0.03
"""What is left between two bounding boxes, whatever the jitter."""
UNSEEN_SHARE = 8
"""One combination in so many is kept from training."""


class SceneError(ValueError):
    """A scene that cannot be drawn, or that words could not tell from another."""


@dataclass(frozen=True)
class SceneObject:
    """One shape, by the names of its attributes."""

    kind: str
    colour: str
    size: str
    position: str

    @property
    def cell(self) -> tuple[int, int]:
        """(row, column) of the 3 x 3 grid."""
        return divmod(POSITIONS.index(self.position), 3)


@dataclass(frozen=True)
class Scene:
    """Objects in reading order (rows, then columns), so that equal scenes compare equal. Raises SceneError when it cannot be drawn."""

    objects: tuple[SceneObject, ...]
    background: str
    aspect: str

    def __post_init__(self) -> None:
        if self.background not in BACKGROUNDS or self.aspect not in ASPECTS:
            raise SceneError(f"The background {self.background} or the aspect {self.aspect} is unknown; use the names of train/scenes.py.")
        if not 1 <= len(self.objects) <= MAX_OBJECTS:
            raise SceneError(f"A scene holds 1 to {MAX_OBJECTS} objects, not {len(self.objects)}; add or remove some.")
        for thing in self.objects:
            self._check(thing)
        if list(self.objects) != sorted(self.objects, key=lambda thing: thing.cell):
            raise SceneError("The objects of a scene are not in reading order; use make_scene.")
        if len({(thing.kind, thing.colour) for thing in self.objects}) < len(self.objects):
            raise SceneError("Two objects share kind and colour, so that no instruction could name one; change either.")
        for one, other in combinations(self.objects, 2):
            if _too_close(one, other, self.aspect):
                raise SceneError(f"The {one.kind} at {one.position} and the {other.kind} at {other.position} would touch; move or shrink one.")

    def _check(self, thing: SceneObject) -> None:
        known = thing.kind in KINDS and thing.colour in COLOURS and thing.size in SIZES and thing.position in POSITIONS
        if not known:
            raise SceneError(f"{thing} has an attribute that is unknown; use the names of train/scenes.py.")
        if thing.colour == self.background:
            raise SceneError(f"A {thing.colour} {thing.kind} cannot be seen on a {self.background} background; change either.")


def make_scene(objects: tuple[SceneObject, ...] | list[SceneObject], background: str, aspect: str) -> Scene:
    """The scene of these objects, in any order. Raises SceneError like Scene."""
    for thing in objects:
        if thing.position not in POSITIONS:
            raise SceneError(f'The position "{thing.position}" is unknown; choose one of {", ".join(POSITIONS)}.')
    return Scene(tuple(sorted(objects, key=lambda thing: thing.cell)), background, aspect)


@cache
def size_of(aspect: str) -> tuple[int, int]:
    """(height, width) in pixels of a picture of this aspect."""
    return ResolutionTable(BASE_SIZE, extra=False).size(ASPECT_ROWS[aspect])


def _too_close(one: SceneObject, other: SceneObject, aspect: str) -> bool:
    """Whether two bounding boxes could come nearer than the gap, at the worst jitter."""
    sides = size_of(aspect)
    shorter = min(sides)
    reach = (EXTENT[one.size] + EXTENT[other.size]) / 2 * (1 + SIZE_JITTER) + 2 * PLACE_JITTER + GAP
    apart = [abs(CENTRES[a] - CENTRES[b]) * side / shorter for a, b, side in zip(one.cell, other.cell, sides, strict=True)]
    return max(apart) < reach


def is_unseen(thing: SceneObject) -> bool:
    """Whether the combination of all four attributes is kept from training; decided by its hash, so it never changes."""
    name = f"{thing.kind}/{thing.colour}/{thing.size}/{thing.position}"
    return hashlib.sha256(name.encode()).digest()[0] % UNSEEN_SHARE == 0


@cache
def combinations_of(*, unseen: bool) -> tuple[SceneObject, ...]:
    """Every object of one side of the split, in the order of the names above."""
    every = (SceneObject(*names) for names in product(KINDS, COLOURS, SIZES, POSITIONS))
    return tuple(thing for thing in every if is_unseen(thing) == unseen)


def random_scene(seed: int, *, unseen: bool, count: int | None = None) -> Scene:
    """The scene of a seed, with 1 to 3 objects or `count`, all from one side of the split."""
    rng = Random(f"scene/{seed}")
    pool = combinations_of(unseen=unseen)
    count = count or rng.randint(1, MAX_OBJECTS)
    background, aspect = rng.choice(BACKGROUNDS), rng.choice(ASPECTS)
    while True:
        try:
            return make_scene(rng.sample(pool, count), background, aspect)
        except SceneError:  # touching, invisible or not to be told apart: draw other objects
            continue
