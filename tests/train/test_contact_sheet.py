"""The contact sheet: everything fits, a verdict can be seen, and no sign becomes a box."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from phase_parallel.train.contact_sheet import BAD, GOOD, MARGIN, TAG, WIDTH, Entry, contact_sheet, wrapped
from phase_parallel.train.demo_wishes import DEMO_WISHES
from phase_parallel.train.suites import SUITES, suite_items

BLUE = np.full((192, 320, 3), (35, 85, 215), np.uint8)
PLAIN = Entry(BLUE, "A wide picture.", "english", "text to image", "nothing on blue", True)


def holds(sheet: Image.Image, colour: tuple[int, int, int]) -> bool:
    return bool((np.asarray(sheet) == colour).all(-1).any())


@pytest.mark.parametrize(("right", "shown", "hidden"), [(True, GOOD, BAD), (False, BAD, GOOD)])
def test_the_verdict_is_drawn(right: bool, shown: tuple[int, int, int], hidden: tuple[int, int, int]) -> None:
    sheet = contact_sheet([replace(PLAIN, right=right)], "title")
    assert holds(sheet, shown) and not holds(sheet, hidden)


def test_no_verdict_draws_no_mark() -> None:
    sheet = contact_sheet([replace(PLAIN, right=None)], "title")
    assert not holds(sheet, GOOD) and not holds(sheet, BAD)


def test_a_chinese_prompt_bears_its_tag() -> None:
    assert holds(contact_sheet([replace(PLAIN, language="chinese")], "title"), TAG)
    assert not holds(contact_sheet([PLAIN], "title"), TAG)


@pytest.mark.parametrize("shape", [(256, 256), (192, 320), (320, 192), (128, 432)])
def test_pictures_keep_their_proportions(shape: tuple[int, int]) -> None:
    sheet = np.asarray(contact_sheet([replace(PLAIN, picture=np.full((*shape, 3), (255, 0, 255), np.uint8))], "title"))
    rows, columns = np.nonzero((sheet == (255, 0, 255)).all(-1))
    height, width = np.ptp(rows) + 3, np.ptp(columns) + 3  # with its edge
    assert abs(height / width - shape[0] / shape[1]) < 0.03 * shape[0] / shape[1]
    assert columns.min() > MARGIN and max(height, width) > 150


def test_given_pictures_stand_beside_the_result() -> None:
    red, green = (np.full((64, 64, 3), colour, np.uint8) for colour in ((255, 0, 0), (0, 255, 0)))
    sheet = np.asarray(contact_sheet([replace(PLAIN, sources=(red, green))], "title"))
    places = [np.argwhere((sheet == colour).all(-1)).mean(0) for colour in ((255, 0, 0), (0, 255, 0), (35, 85, 215))]
    assert places[0][0] < places[1][0] and places[0][1] == places[1][1] < places[2][1]


def test_it_grows_by_rows_and_stays_as_wide() -> None:
    one, five = contact_sheet([PLAIN], "title"), contact_sheet([PLAIN] * 5, "title")
    assert one.width == five.width == WIDTH and five.height > one.height + 200


def test_a_description_without_end_is_cut() -> None:
    short, endless = contact_sheet([replace(PLAIN, seen="red " * 40)], "title"), contact_sheet([replace(PLAIN, seen="red " * 4000)], "title")
    assert short.height == endless.height


def test_lines_fit() -> None:
    lines = wrapped("a picture of a large red circle in the centre", 13, 120)
    assert len(lines) > 1 and " ".join(lines) == "a picture of a large red circle in the centre"
    assert wrapped("", 13, 100) == [""]


def test_all_words_on_sheets_are_in_the_font() -> None:
    """Pillow's own font has no Chinese signs; they would become boxes."""
    meanings = [item.meaning for suite in SUITES for item in suite_items(suite, 10)] + [wish.meaning for wish in DEMO_WISHES]
    assert all(text.isascii() for text in meanings)
