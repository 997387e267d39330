"""The size table: the published rows, the nearest ratio, and every way to write a size."""

from __future__ import annotations

import pytest

from phase_parallel.models.hunyuan_image_3.resolution import ImageSizeError, ResolutionTable

BASE = ResolutionTable(1024, extra=False)
INSTRUCT = ResolutionTable(1024, extra=True)


def test_release_table() -> None:
    assert len(BASE) == 33
    assert BASE.rows[:10:9] == [(512, 2048), (576, 1472)]
    assert BASE.rows[16:19] == [(1024, 1024), (1088, 960), (1152, 896)]
    assert BASE.rows[24] == (1536, 512)
    assert BASE.rows[32] == (2048, 512)
    assert INSTRUCT.rows[:33] == BASE.rows
    assert INSTRUCT.rows[33:] == [(1024, 768), (1280, 720), (768, 1024), (720, 1280)]


def test_other_base_sizes() -> None:
    small = ResolutionTable(256, extra=True)
    assert small.rows[0] == (128, 512)
    assert small.rows[16] == (256, 256)
    assert small.rows[33] == (1024, 768)
    odd = ResolutionTable(272, extra=False)  # steps of 17: everything is cut down to multiples of 16
    assert len(odd) == 33
    assert all(side % 16 == 0 for row in odd.rows for side in row)
    with pytest.raises(ImageSizeError, match="below 256"):
        ResolutionTable(128, extra=False)


@pytest.mark.parametrize(
    ("table", "size", "index"),
    [(INSTRUCT, (1024, 768), 33), (BASE, (1024, 768), 18), (BASE, (1, 100000), 0), (BASE, (9999, 1), 32)],
)
def test_nearest(table: ResolutionTable, size: tuple[int, int], index: int) -> None:
    assert table.nearest(*size) == index


def test_every_row_is_its_own_nearest() -> None:
    for table in (BASE, INSTRUCT, ResolutionTable(256, extra=True), ResolutionTable(512, extra=True)):
        assert [table.nearest(*row) for row in table.rows] == list(range(len(table)))


@pytest.mark.parametrize(
    ("text", "kind", "size"),
    [
        ("512x2048", "base", (512, 2048)),
        (" 512 X 2048 ", "instruct", (512, 2048)),
        ("512×2048", "distil", (512, 2048)),
        ("1:4", "base", (512, 2048)),  # height:width
        ("4:1", "instruct", (512, 2048)),  # width:height
        ("4:1", "distil", (512, 2048)),
        ("<img_ratio_0>", "base", (512, 2048)),
        ((512, 2048), "instruct", (512, 2048)),
        ("120x400", "base", (512, 1728)),
    ],
)
def test_forms_of_a_size(text, kind, size) -> None:
    assert INSTRUCT.size(INSTRUCT.parse_image_size(text, kind)) == size


def test_auto_stays_auto() -> None:
    assert BASE.parse_image_size("Auto", "base") == "auto"


@pytest.mark.parametrize(
    "text", ["", "big", "512", "512x", "x512", "-1x5", "1.5:1", "512x512x3", "<img_ratio_x>"]
)
def test_unreadable_sizes(text) -> None:
    with pytest.raises(ImageSizeError, match="cannot be read; write"):
        BASE.parse_image_size(text, "base")


def test_sizes_outside_the_table() -> None:
    with pytest.raises(ImageSizeError, match=r"<img_ratio_33> is not in .* from 0 to 32"):
        BASE.parse_image_size("<img_ratio_33>", "base")
    assert INSTRUCT.parse_image_size("<img_ratio_33>", "instruct") == 33
    with pytest.raises(ImageSizeError, match="0 x 5 is empty"):
        BASE.parse_image_size("0x5", "base")
    with pytest.raises(ImageSizeError, match="from 0 to 32"):
        BASE.size(-1)
