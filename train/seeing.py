"""Looks at a picture without having learnt anything: the plain background, what stands out from it, and the names of its attributes.

What cannot be named is None, never a guess. Knows nothing of how scenes are drawn except the palette, the grid and the sizes. Imports numpy and scipy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.ndimage import binary_dilation, binary_erosion, distance_transform_edt, find_objects, gaussian_filter, label

from .scenes import BACKGROUNDS, CENTRES, COLOURS, EXTENT, PALETTE, POSITIONS, SIZES
from .shape_measures import AREA, measure, name_shape

SMOOTHING = 0.7
"""Radius in pixels that takes noise away before anything is compared."""
FRAME = 3
"""Width of the border in pixels where only background is expected."""
FRAME_SHARE = 0.6
"""The background must fill so much of the frame."""
STANDS_OUT = 45.0
"""Distance of a colour from the background's at which a pixel is no background; less than half of the palette's smallest distance."""
NEAR = 52.0
"""Farthest that a colour may lie from the one that it is named after."""
SPECK = 0.0025
"""Smallest area that is looked at, as a share of the square over the shorter side; less than a third of the smallest shape's."""
RIM = 2
"""Pixels from an edge where colours may be mixed."""
LEAST_MIXED = 0.25
"""Share of a thing's pixels that its colour is taken from."""
HALO = 4
"""Pixels around a thing in which its blurred edge still counts."""
OVERSHOOT = 0.2
"""Noise around "all" and "nothing" that is kept, so that it averages out."""
TOO_SMALL, TOO_LARGE = 0.75, 1.3
"""Factors on the smallest and the largest extent outside which a size has no name."""


@dataclass(frozen=True)
class SeenObject:
    """One shape that stands out; None for what is unclear. `box` is (top, left, bottom, right) in pixels, the last two behind the end."""

    kind: str | None
    colour: str | None
    size: str | None
    position: str
    box: tuple[int, int, int, int]


@dataclass(frozen=True)
class Sight:
    """What a picture shows; without a background nothing can stand out, so `objects` is empty then."""

    background: str | None
    objects: tuple[SeenObject, ...]


def see(pixels: np.ndarray) -> Sight:
    """Look at uint8 `[H, W, 3]`. Raises ValueError for another shape or dtype."""
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(f"The picture is {pixels.dtype} {list(pixels.shape)}; pass uint8 [height, width, 3].")
    smooth = gaussian_filter(pixels.astype(np.float32), (SMOOTHING, SMOOTHING, 0))
    ground = _ground(smooth)
    if ground is None:
        return Sight(None, ())
    background = _name_colour(ground, BACKGROUNDS)
    masks = list(_masks(smooth, ground))
    everything = np.logical_or.reduce(masks) if masks else None
    seen = [_look(smooth, mask, everything & ~mask, ground) for mask in masks]
    return Sight(background, tuple(sorted(seen, key=lambda thing: (POSITIONS.index(thing.position), thing.box))))


def _ground(smooth: np.ndarray) -> np.ndarray | None:
    """Colour `[3]` that fills the frame; None where no colour does."""
    frame = np.concatenate(
        [part.reshape(-1, 3) for part in (smooth[:FRAME], smooth[-FRAME:], smooth[FRAME:-FRAME, :FRAME], smooth[FRAME:-FRAME, -FRAME:])]
    )
    ground = np.median(frame, 0)
    share = (np.linalg.norm(frame - ground, axis=1) < STANDS_OUT).mean()
    return ground if share >= FRAME_SHARE else None


def _name_colour(colour: np.ndarray, names: tuple[str, ...]) -> str | None:
    """Name of the nearest palette colour if it is near and one of `names`."""
    distance = {name: float(np.linalg.norm(colour - np.array(rgb))) for name, rgb in PALETTE.items()}
    nearest = min(distance, key=lambda name: distance[name])
    return nearest if nearest in names and distance[nearest] <= NEAR else None


def _masks(smooth: np.ndarray, ground: np.ndarray) -> Iterator[np.ndarray]:
    """Bool `[H, W]` of each thing that stands out: connected pixels, parted where two colours touch."""
    pieces, _ = label(np.linalg.norm(smooth - ground, axis=2) > STANDS_OUT)
    smallest = SPECK * min(smooth.shape[:2]) ** 2
    for number, window in enumerate(find_objects(pieces), start=1):
        piece = pieces[window] == number
        if piece.sum() < smallest:
            continue
        for part in _parted(smooth[window], piece, smallest):
            mask = np.zeros(pieces.shape, bool)
            mask[window] = part
            yield mask


def _parted(smooth: np.ndarray, piece: np.ndarray, smallest: float) -> list[np.ndarray]:
    """Masks `[h, w]` of one connected piece: one for each palette colour that has an inside of its own (a blurred edge has none)."""
    distance = np.stack([np.linalg.norm(smooth - np.array(PALETTE[name], np.float32), axis=2) for name in COLOURS])
    nearest = np.where(piece, distance.argmin(0), -1)
    inner = np.full(piece.shape, -1)
    for colour in range(len(COLOURS)):
        core = binary_erosion(nearest == colour, iterations=RIM)
        if core.sum() >= smallest / 4:
            inner[core] = colour
    colours = np.unique(inner[inner >= 0])
    if len(colours) < 2:
        return [piece]
    _, (rows, columns) = distance_transform_edt(inner < 0, return_indices=True)
    owner = inner[rows, columns]
    return [piece & (owner == colour) for colour in colours]


def _look(smooth: np.ndarray, mask: np.ndarray, others: np.ndarray, ground: np.ndarray) -> SeenObject:
    """Name the attributes of one thing; its edge runs where its colour and the background's are mixed half and half."""
    height, width = mask.shape
    top, left, bottom, right = _box(mask)
    top, left = max(top - HALO, 0), max(left - HALO, 0)
    window = np.s_[top : bottom + HALO, left : right + HALO]
    smooth, mask = smooth[window], mask[window]
    colour = _own_colour(smooth, mask, ground)
    cover = _cover(smooth, mask, others[window], towards=colour - ground, ground=ground)
    # A thing of many colours, which no single one covers, has only a place.
    solid = cover > 0.5
    plain = bool(solid.any()) and float(cover.sum()) > mask.sum() / 2
    box = _box(solid if plain else mask)
    kind = name_shape(measure(cover)) if plain else None
    extent = max(box[2] - box[0], box[3] - box[1]) if kind is None else (float(cover.sum()) / AREA[kind]) ** 0.5
    box = (box[0] + top, box[1] + left, box[2] + top, box[3] + left)
    row, column = _cell((box[0] + box[2]) / 2 / height), _cell((box[1] + box[3]) / 2 / width)
    return SeenObject(
        kind=kind,
        colour=_name_colour(colour, COLOURS) if plain else None,
        size=_name_size(extent / min(height, width)) if plain else None,
        position=POSITIONS[3 * row + column],
        box=box,
    )


def _own_colour(smooth: np.ndarray, mask: np.ndarray, ground: np.ndarray) -> np.ndarray:
    """Colour `[3]` of a thing: the median of its pixels that are least mixed with the background."""
    inner = smooth[mask]
    distance = np.linalg.norm(inner - ground, axis=1)
    return np.median(inner[distance >= np.quantile(distance, 1 - LEAST_MIXED)], 0)


def _cover(smooth: np.ndarray, mask: np.ndarray, others: np.ndarray, *, towards: np.ndarray, ground: np.ndarray) -> np.ndarray:
    """fp32 `[h, w]`: how far each pixel lies on the way from the background's colour to the thing's, with a little noise left, and 0 away from it."""
    share = (smooth - ground) @ towards / max(float(towards @ towards), 1.0)
    near = binary_dilation(mask, iterations=HALO) & ~binary_dilation(others, iterations=HALO)
    return np.where(near | mask, share.clip(-OVERSHOOT, 1 + OVERSHOOT), 0)


def _box(mask: np.ndarray) -> tuple[int, int, int, int]:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return int(rows[0]), int(columns[0]), int(rows[-1]) + 1, int(columns[-1]) + 1


def _cell(share: float) -> int:
    return min(range(len(CENTRES)), key=lambda place: abs(CENTRES[place] - share))


def _name_size(extent: float) -> str | None:
    """The size whose extent is nearest by ratio; None for what is much smaller or larger than all."""
    if not EXTENT[SIZES[0]] * TOO_SMALL <= extent <= EXTENT[SIZES[-1]] * TOO_LARGE:
        return None
    return min(SIZES, key=lambda size: max(extent / EXTENT[size], EXTENT[size] / extent))

