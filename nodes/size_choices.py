"""The picture sizes that the size widgets offer, as labels. The checkpoint's own table decides the final
size.

Labels are width x height, as ComfyUI writes sizes; the model's own notation is height x width.
"""

from __future__ import annotations

from functools import cache
from math import gcd

from ..models.hunyuan_image_3.resolution import ResolutionTable

AUTO = "auto"
FOLLOW_IMAGE = "follow image 1"
WIDTH_HEIGHT = "width x height"

RELEASE_BASE_SIZE = 1024


@cache
def bucket_labels() -> tuple[str, ...]:
    """Labels of all sizes of the release checkpoints, widest first, e.g. ``1280x768 (5:3)``."""
    rows = ResolutionTable(RELEASE_BASE_SIZE, extra=True).rows
    return tuple(_label(height, width) for height, width in sorted(rows, key=lambda row: row[0] / row[1]))


def square_label() -> str:
    return _label(RELEASE_BASE_SIZE, RELEASE_BASE_SIZE)


def _label(height: int, width: int) -> str:
    divisor = gcd(height, width)
    return f"{width}x{height} ({width // divisor}:{height // divisor})"


def parse_label(label: str) -> tuple[int, int]:
    """(height, width) of a label."""
    width, height = label.split(" ")[0].split("x")
    return int(height), int(width)


def image_size(image: object) -> tuple[int, int]:
    """(height, width) of a ComfyUI IMAGE, ``[batch, height, width, channels]``. Raises ValueError on another
    shape.
    """
    shape = tuple(getattr(image, "shape", ()))
    if len(shape) != 4 or 0 in shape:
        raise ValueError(
            f"image has shape {list(shape)}, but an IMAGE is [batch, height, width, channels]; connect an "
            "image."
        )
    return shape[1], shape[2]


def nearest(height: int, width: int) -> tuple[int, int]:
    """(height, width) of the release's table with the nearest proportions."""
    table = ResolutionTable(RELEASE_BASE_SIZE, extra=True)
    return table.size(table.nearest(height, width))
