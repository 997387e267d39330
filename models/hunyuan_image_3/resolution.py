"""The picture sizes a checkpoint can make: a fixed table, one height and width per `<img_ratio_k>` token.

A requested size is never generated as such: the row with the nearest height/width ratio decides both the
token and the actual size. Pure; imports the standard library only.
"""

from __future__ import annotations

import re
from typing import Literal

ALIGN = 16
STEPS = 16
BASE_ROWS = 2 * STEPS + 1
EXTRA_SIZES = ((1024, 768), (1280, 720), (768, 1024), (720, 1280))
SQUARE_INDEX = STEPS
_PAIR = re.compile(r"(\d{1,6})\s*([xX×:])\s*(\d{1,6})")
_RATIO_TOKEN = re.compile(r"<img_ratio_(\d{1,4})>")


class ImageSizeError(ValueError):
    """A requested picture size cannot be understood or is outside the table."""


class ResolutionTable:
    """`rows[k]` is the (height, width) in pixels that `<img_ratio_k>` stands for."""

    def __init__(self, base_size: int, extra: bool) -> None:
        """33 rows around `base_size` x `base_size`; `extra` appends the sizes that only the Instruct releases
        know.

        Raises ImageSizeError for a base size that is too small for the table's 16 steps of at least 16
        pixels.
        """
        if base_size < ALIGN * STEPS:
            raise ImageSizeError(
                f"image_base_size {base_size} is below {ALIGN * STEPS}, the smallest that has a size table; "
                "use the config.json of a release."
            )
        self.rows = _walk(base_size)
        if extra:
            for height, width in EXTRA_SIZES:
                if all(height / width != h / w for h, w in self.rows):
                    self.rows.append((height, width))

    def __len__(self) -> int:
        return len(self.rows)

    def size(self, index: int) -> tuple[int, int]:
        """(height, width) of a row. Raises ImageSizeError when the table has no such row."""
        if not 0 <= index < len(self.rows):
            raise ImageSizeError(
                f"<img_ratio_{index}> is not in this checkpoint's size table; choose an index from 0 to "
                f"{len(self.rows) - 1}."
            )
        return self.rows[index]

    def nearest(self, height: int, width: int) -> int:
        """Index of the first row with the nearest height/width. Raises ImageSizeError on a zero side."""
        if height < 1 or width < 1:
            raise ImageSizeError(
                f"The picture size {height} x {width} is empty; both sides must be at least 1."
            )
        wanted = height / width
        return min(range(len(self.rows)), key=lambda k: abs(self.rows[k][0] / self.rows[k][1] - wanted))

    def parse_image_size(
        self, size: str | tuple[int, int], kind: Literal["base", "instruct", "distil"]
    ) -> int | Literal["auto"]:
        """Table index of a size as the user writes it, or "auto".

        Forms: "HxW" in pixels, "a:b", "<img_ratio_k>", "auto", or a pair (height, width). As in the releases,
        "a:b" is width:height for Instruct and Distil but height:width for base. Raises ImageSizeError with a
        sentence otherwise.
        """
        if isinstance(size, tuple):
            return self.nearest(*size)
        text = size.strip()
        if text.lower() == "auto":
            return "auto"
        if match := _RATIO_TOKEN.fullmatch(text):
            index = int(match[1])
            self.size(index)
            return index
        match = _PAIR.fullmatch(text)
        if not match:
            raise ImageSizeError(
                f'The image size "{size}" cannot be read; write "auto", height x width such as "1024x768", '
                'a ratio such as "16:9", or "<img_ratio_k>".'
            )
        first, second = int(match[1]), int(match[3])
        if match[2] == ":" and kind != "base":
            first, second = second, first
        return self.nearest(first, second)


def _walk(base: int) -> list[tuple[int, int]]:
    """From the square to twice and half the base size in 16 steps, both ways; sorted by height/width."""
    step, low, high = base // STEPS, base // 2, base * 2
    rows = [(base, base)]
    long, short = base, base
    while long < high or short > low:
        long, short = min(long + step, high), max(short - step, low)
        rows += [(long, short), (short, long)]
    aligned = [(height // ALIGN * ALIGN, width // ALIGN * ALIGN) for height, width in rows]
    return sorted(aligned, key=lambda row: row[0] / row[1])
