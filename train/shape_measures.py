"""Names a shape by measures of its area: the hole in it, how far it spreads, and how strongly it repeats every half, third, quarter and fifth turn.

With z = x + iy from the centre of gravity, the mean of z**n is the same before and after any round blur (z**n is harmonic), so these measures do not care
how sharp a picture is. All are divided by powers of the area, so that they do not care for size either. Imports numpy and scipy.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

import numpy as np
from scipy.ndimage import binary_fill_holes

FARTHEST = 1.0
"""Above this distance from every ideal, in tolerances, a shape has no name."""
CLEARER = 1.3
"""The second nearest ideal must be so many times as far as the nearest."""


@dataclass(frozen=True)
class Measures:
    """Of one shape; A is its area."""

    hole: float
    """Holes, as a share of the area with them."""
    spread: float
    """Mean of |z|**2, over A: 1 / (2 pi) for a disc, more for everything else."""
    half: float
    """|mean of z**2| over A: 0 unless the shape is longer one way than the other."""
    third: float
    """|mean of z**3| over A**(3/2)."""
    quarter: float
    """Real part of the mean of z**4 over A**2: below 0 with corners on the diagonals, above 0 with arms along the axes."""
    fifth: float
    """|mean of z**5| over A**(5/2)."""


TOLERANCE = Measures(hole=0.15, spread=0.04, half=0.03, third=0.035, quarter=0.0095, fifth=0.017)
"""How far a measure may be off; about half the way between the kinds that it tells apart. A distance adds the squares of all."""

IDEALS = {
    "circle": Measures(0, 0.1592, 0, 0, 0, 0),
    "square": Measures(0, 0.1667, 0, 0, -0.0167, 0),
    "triangle": Measures(0, 0.1925, 0, 0.0675, 0, 0),
    "star": Measures(0, 0.1974, 0, 0, 0, 0.0319),
    "ring": Measures(0.25, 0.2653, 0, 0, 0, 0),
    "cross": Measures(0, 0.1864, 0, 0, 0.0257, 0),
}
"""Of an equilateral triangle, a star with five points and 0.45 of its radius between them, a ring with half its radius free, a cross with arms of 0.36."""

AREA = {"circle": math.pi / 4, "square": 1.0, "triangle": math.sqrt(3) / 4, "star": 0.3657, "ring": 3 * math.pi / 16, "cross": 0.5904}
"""Of the same figures, when the longer side of the box is 1."""


def measure(cover: np.ndarray) -> Measures:
    """Measures of fp32 `[h, w]`, the share of each pixel that the shape covers; noise around 0 and 1 is welcome. Its sum must be positive."""
    y, x = np.mgrid[: cover.shape[0], : cover.shape[1]]
    area = float(cover.sum())
    z = (x - (cover * x).sum() / area) + 1j * (y - (cover * y).sum() / area)
    turns = {n: complex((cover * z**n).sum()) / area ** (1 + n / 2) for n in (2, 3, 4, 5)}
    solid = cover > 0.5
    filled = max(int(binary_fill_holes(solid).sum()), 1)
    return Measures(
        hole=1 - int(solid.sum()) / filled,
        spread=float((cover * np.abs(z) ** 2).sum()) / area**2,
        half=abs(turns[2]),
        third=abs(turns[3]),
        quarter=turns[4].real,
        fifth=abs(turns[5]),
    )


def name_shape(found: Measures) -> str | None:
    """The kind whose ideal is nearest; None where none is near, or two are nearly as near."""
    ranked = sorted((_distance(found, ideal), kind) for kind, ideal in IDEALS.items())
    (nearest, kind), (second, _) = ranked[:2]
    return kind if nearest <= FARTHEST and second >= CLEARER * nearest else None


def _distance(one: Measures, other: Measures) -> float:
    return math.hypot(*((a - b) / allowed for a, b, allowed in zip(astuple(one), astuple(other), astuple(TOLERANCE), strict=True)))
