"""A contact sheet: pictures in a grid, below each what was asked for and what the judge saw, with a tick or a cross. Imports Pillow and numpy.

The font is the one inside Pillow, which has no Chinese signs. So the words are English, and a Chinese prompt has the tag "zh" before its meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from .words import LanguageName

WIDTH = 1000
COLUMNS = 4
MARGIN, GAP, PAD = 20, 12, 12
ROOM = 200
"""Height in pixels that the pictures of a row share."""
SOURCE = 62
"""Longer side of a picture that was given."""
ARROW = 22
SEEN_LINES = 4
"""What is seen in a wrong picture may have no end."""
TITLE_SIZE, TEXT_SIZE, SMALL_SIZE = 14, 13, 11
LEADING = 1.32
SCALE = 2
"""Everything is drawn so many times as large and then reduced, for smooth lines; pictures are put in afterwards, pixel by pixel where they fit."""

PAGE, CARD, EDGE = (246, 247, 249), (255, 255, 255), (222, 226, 232)
INK, GREY = (28, 32, 38), (96, 104, 116)
GOOD, BAD, TAG = (26, 148, 82), (206, 48, 52), (58, 98, 190)
Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class Entry:
    """`picture` and `sources`: uint8 `[H, W, 3]`. `prompt`: in English, also where it was given in another `language`; `how`: a word on the way it was
    made; `seen`: what the judge saw; `right`: tick, cross, or neither."""

    picture: np.ndarray
    prompt: str
    language: LanguageName
    how: str
    seen: str
    right: bool | None
    sources: tuple[np.ndarray, ...] = ()


def contact_sheet(entries: Sequence[Entry], title: str) -> Image.Image:
    """RGB, WIDTH pixels wide and as high as it takes; COLUMNS in a row."""
    column = (WIDTH - 2 * MARGIN - (COLUMNS - 1) * GAP) // COLUMNS
    rows = [entries[start : start + COLUMNS] for start in range(0, len(entries), COLUMNS)]
    heights = [max(_card_height(entry, column) for entry in row) for row in rows]
    top = MARGIN + _line(TITLE_SIZE) + PAD
    sheet = Image.new("RGB", (WIDTH * SCALE, (top + sum(heights) + GAP * max(len(rows) - 1, 0) + MARGIN) * SCALE), PAGE)
    draw = ImageDraw.Draw(sheet)
    _write(draw, (MARGIN, MARGIN), title, TITLE_SIZE, INK)
    places: list[tuple[Image.Image, tuple[int, int]]] = []
    for row, height in zip(rows, heights, strict=True):
        for number, entry in enumerate(row):
            left = MARGIN + number * (column + GAP)
            places += _card(draw, entry, (left, top, left + column, top + height))
        top += height + GAP
    sheet = sheet.resize((WIDTH, sheet.height // SCALE), Image.Resampling.LANCZOS)
    for picture, place in places:
        sheet.paste(picture, place)
    return sheet


def _card(draw: ImageDraw.ImageDraw, entry: Entry, box: Box) -> list[tuple[Image.Image, tuple[int, int]]]:
    """Frame and words of an entry; returns its pictures and where they go."""
    left, top, right, bottom = box
    draw.rounded_rectangle([value * SCALE for value in (left, top, right - 1, bottom - 1)], radius=8 * SCALE, fill=CARD, outline=EDGE, width=SCALE)
    places = _pictures(draw, entry, (left + PAD, top + PAD, right - PAD, top + PAD + ROOM))
    y, inner = top + PAD + ROOM + PAD, right - left - 2 * PAD
    _tagline(draw, entry, left + PAD, y)
    y += _line(SMALL_SIZE) + 4
    for line in wrapped(entry.prompt, TEXT_SIZE, inner):
        _write(draw, (left + PAD, y), line, TEXT_SIZE, INK)
        y += _line(TEXT_SIZE)
    y += 6
    _mark(draw, entry.right, left + PAD, y + 1)
    for line in _seen_lines(entry, inner):
        _write(draw, (left + PAD + 20, y), line, SMALL_SIZE, GREY)
        y += _line(SMALL_SIZE)
    return places


def _card_height(entry: Entry, column: int) -> int:
    inner = column - 2 * PAD
    prompt = len(wrapped(entry.prompt, TEXT_SIZE, inner)) * _line(TEXT_SIZE)
    seen = max(len(_seen_lines(entry, inner)) * _line(SMALL_SIZE), 16)
    return PAD + ROOM + PAD + _line(SMALL_SIZE) + 4 + prompt + 6 + seen + PAD


def _pictures(draw: ImageDraw.ImageDraw, entry: Entry, room: Box) -> list[tuple[Image.Image, tuple[int, int]]]:
    """The given pictures, one above the other, an arrow, and what was made of them; without given ones the picture alone."""
    left, top, right, bottom = room
    middle = (top + bottom) // 2
    if not entry.sources:
        picture = _fitted(entry.picture, right - left, bottom - top)
        return [(picture, (left + (right - left - picture.width) // 2, middle - picture.height // 2))]
    given = [_fitted(pixels, SOURCE, SOURCE) for pixels in entry.sources]
    height = sum(picture.height for picture in given) + GAP * (len(given) - 1)
    places, y = [], middle - height // 2
    for picture in given:
        places.append((picture, (left + (SOURCE - picture.width) // 2, y)))
        y += picture.height + GAP
    _arrow(draw, left + SOURCE + 5, middle)
    first = left + SOURCE + ARROW + 8
    picture = _fitted(entry.picture, right - first, bottom - top)
    return [*places, (picture, (first + (right - first - picture.width) // 2, middle - picture.height // 2))]


def _fitted(pixels: np.ndarray, width: int, height: int) -> Image.Image:
    """At most so large, with a thin edge, so that a white background ends somewhere."""
    picture = Image.fromarray(pixels)
    share = min(width / picture.width, height / picture.height)
    picture = picture.resize((max(round(picture.width * share), 1), max(round(picture.height * share), 1)), Image.Resampling.LANCZOS)
    ImageDraw.Draw(picture).rectangle((0, 0, picture.width - 1, picture.height - 1), outline=EDGE)
    return picture


def _tagline(draw: ImageDraw.ImageDraw, entry: Entry, x: int, y: int) -> None:
    """Language and way."""
    tag = "zh" if entry.language == "chinese" else "en"
    width = round(_font(SMALL_SIZE).getlength(tag) / SCALE) + 8
    colour = TAG if tag == "zh" else GREY
    draw.rounded_rectangle([value * SCALE for value in (x, y - 1, x + width, y + _line(SMALL_SIZE) - 1)], radius=3 * SCALE, fill=colour)
    _write(draw, (x + 4, y), tag, SMALL_SIZE, CARD)
    _write(draw, (x + width + 6, y), entry.how, SMALL_SIZE, GREY)


def _mark(draw: ImageDraw.ImageDraw, right: bool | None, x: int, y: int) -> None:
    """A tick or a cross in a disc of 14 pixels, drawn and not written."""
    if right is None:
        return
    corners = [value * SCALE for value in (x, y, x + 14, y + 14)]
    draw.ellipse(corners, fill=GOOD if right else BAD)
    strokes = [[(3.6, 7.4), (6.2, 10.0), (10.6, 4.6)]] if right else [[(4.4, 4.4), (9.6, 9.6)], [(9.6, 4.4), (4.4, 9.6)]]
    for stroke in strokes:
        draw.line([((x + u) * SCALE, (y + v) * SCALE) for u, v in stroke], fill=CARD, width=2 * SCALE, joint="curve")


def _arrow(draw: ImageDraw.ImageDraw, x: int, y: int) -> None:
    draw.line([(x * SCALE, y * SCALE), ((x + ARROW - 6) * SCALE, y * SCALE)], fill=GREY, width=2 * SCALE)
    draw.polygon([((x + u) * SCALE, (y + v) * SCALE) for u, v in ((ARROW - 8, -5), (ARROW, 0), (ARROW - 8, 5))], fill=GREY)


def _seen_lines(entry: Entry, inner: int) -> list[str]:
    lines = wrapped(entry.seen, SMALL_SIZE, inner - 20)
    return lines if len(lines) <= SEEN_LINES else [*lines[: SEEN_LINES - 1], f"{lines[SEEN_LINES - 1]} ..."]


def wrapped(text: str, size: int, width: int) -> list[str]:
    """Lines of at most `width` pixels, broken between words; a longer word has a line for itself."""
    font, lines = _font(size), [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width * SCALE:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _write(draw: ImageDraw.ImageDraw, place: tuple[int, int], text: str, size: int, colour: tuple[int, int, int]) -> None:
    draw.text((place[0] * SCALE, place[1] * SCALE), text, font=_font(size), fill=colour)


def _line(size: int) -> int:
    return round(size * LEADING)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size * SCALE)
    assert isinstance(font, ImageFont.FreeTypeFont), "a size is asked for, so Pillow gives the font that has sizes"
    return font
