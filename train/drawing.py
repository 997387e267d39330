"""Draws a scene: antialiased shapes in exact palette colours, place and size moved a little by a seed. Imports numpy and Pillow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from random import Random

import numpy as np
from PIL import Image, ImageDraw

from .scenes import CENTRES, EXTENT, PALETTE, PLACE_JITTER, SIZE_JITTER, Scene, SceneObject

OVERSAMPLE = 8
CIRCLE_CORNERS = 72
RING_HOLE = 0.5
CROSS_ARM = 0.36
STAR_WAIST = 0.45
"""Radius of a star's inner corners, as a share of its outer ones."""

Outline = tuple[tuple[float, float], ...]


def render(scene: Scene, height: int, width: int, seed: int) -> np.ndarray:
    """uint8 `[height, width, 3]`. The same seed moves what stands in a cell the same way, whatever else the scene holds: a source and its edit agree."""
    picture = np.empty((height, width, 3), np.float32)
    picture[:] = PALETTE[scene.background]
    for thing in scene.objects:
        y, x, extent = _placed(thing, height, width, seed)
        top, left, cover = _cover(thing.kind, y, x, extent)
        y0, x0 = max(top, 0), max(left, 0)
        window = picture[y0 : top + cover.shape[0], x0 : left + cover.shape[1]]
        share = cover[y0 - top :, x0 - left :][: window.shape[0], : window.shape[1], None]
        window += share * (np.array(PALETTE[thing.colour], np.float32) - window)
    return np.rint(picture).astype(np.uint8)


def _placed(thing: SceneObject, height: int, width: int, seed: int) -> tuple[float, float, float]:
    """Centre (y, x) and extent of an object in pixels."""
    rng = Random(f"place/{seed}/{thing.position}")
    shorter = min(height, width)
    row, column = thing.cell
    y = CENTRES[row] * height + rng.uniform(-PLACE_JITTER, PLACE_JITTER) * shorter
    x = CENTRES[column] * width + rng.uniform(-PLACE_JITTER, PLACE_JITTER) * shorter
    return y, x, EXTENT[thing.size] * shorter * (1 + rng.uniform(-SIZE_JITTER, SIZE_JITTER))


def _cover(kind: str, y: float, x: float, extent: float) -> tuple[int, int, np.ndarray]:
    """First row, first column and fp32 `[side, side]`: the share of each pixel that the shape covers."""
    side = math.ceil(extent) + 2
    top, left = math.floor(y - side / 2), math.floor(x - side / 2)
    mask = Image.new("L", (side * OVERSAMPLE, side * OVERSAMPLE))
    draw = ImageDraw.Draw(mask)
    for fill, outline in zip((255, 0), outlines(kind), strict=False):
        corners = [((x - left + u * extent) * OVERSAMPLE - 0.5, (y - top + v * extent) * OVERSAMPLE - 0.5) for u, v in outline]
        draw.polygon(corners, fill=fill)
    return top, left, np.asarray(mask.reduce(OVERSAMPLE), np.float32) / 255


@cache
def outlines(kind: str) -> tuple[Outline, ...]:
    """Corners (x, y) of the shape and, of a ring, of its hole; the bounding box is centred on 0 and its longer side is 1."""
    if kind == "ring":
        return _fitted(_around([1.0] * CIRCLE_CORNERS)), tuple((u * RING_HOLE, v * RING_HOLE) for u, v in _fitted(_around([1.0] * CIRCLE_CORNERS)))
    arm = CROSS_ARM / 2
    corners = {
        "circle": lambda: _around([1.0] * CIRCLE_CORNERS),
        "square": lambda: ((-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0)),
        "triangle": lambda: _around([1.0] * 3),
        "star": lambda: _around([1.0, STAR_WAIST] * 5),
        "cross": lambda: tuple(_quarter_turns(((-arm, -0.5), (arm, -0.5), (arm, -arm)))),
    }
    return (_fitted(corners[kind]()),)


def _around(radii: list[float]) -> Outline:
    """Corners at equal angles, the first one on top."""
    angles = [2 * math.pi * number / len(radii) for number in range(len(radii))]
    return tuple((radius * math.sin(angle), -radius * math.cos(angle)) for radius, angle in zip(radii, angles, strict=True))


def _quarter_turns(corners: Outline) -> Iterator[tuple[float, float]]:
    for _ in range(4):
        yield from corners
        corners = tuple((-v, u) for u, v in corners)


def _fitted(corners: Outline) -> Outline:
    us, vs = [u for u, _ in corners], [v for _, v in corners]
    longer = max(max(us) - min(us), max(vs) - min(vs))
    middle_u, middle_v = (max(us) + min(us)) / 2, (max(vs) + min(vs)) / 2
    return tuple(((u - middle_u) / longer, (v - middle_v) / longer) for u, v in corners)
