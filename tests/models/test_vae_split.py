"""Which rows of a picture belong to whom."""

from __future__ import annotations

import pytest

from phase_parallel.models.hunyuan_image_3.vae_split import RowSplit, bands, deal

SIZES = [(height, ranks) for height in (1, 2, 3, 5, 7, 8, 33, 64, 129) for ranks in range(1, 9)]


def splits(height: int, ranks: int) -> list[RowSplit]:
    return [RowSplit.of(height, ranks=ranks, rank=rank) for rank in range(ranks)]


@pytest.mark.parametrize(("height", "ranks"), SIZES)
def test_pieces_cover_the_picture_once_and_evenly(height: int, ranks: int) -> None:
    pieces = splits(height, ranks)
    owned = [row for split in pieces[: min(height, ranks)] for row in range(*split.rows().indices(height))]
    assert owned == list(range(height))
    heights = pieces[0].heights
    assert max(heights) - min(heights) <= 1
    assert {split.heights for split in pieces} == {heights}
    assert sum(pieces[0].shares) == pytest.approx(1)


@pytest.mark.parametrize(("height", "ranks"), SIZES)
def test_neighbours_know_each_other(height: int, ranks: int) -> None:
    pieces = splits(height, ranks)[: min(height, ranks)]
    assert [split.mine for split in pieces] == list(range(len(pieces)))
    assert [split.above for split in pieces] == [None, *range(len(pieces) - 1)]
    assert [split.below for split in pieces] == [*range(1, len(pieces)), None]


def test_ranks_without_rows_double_the_last_piece() -> None:
    pieces = splits(3, 8)
    assert pieces[0].heights == (1, 1, 1)
    assert [split.mine for split in pieces] == [0, 1, 2, 2, 2, 2, 2, 2]


def test_rows_grow_with_the_level() -> None:
    split = RowSplit.of(7, ranks=3, rank=1)
    assert (split.heights, split.tallest, split.height) == ((3, 2, 2), 3, 7)
    assert (split.rows(), split.rows(16)) == (slice(3, 5), slice(48, 80))


def test_larger_shares_come_first() -> None:
    assert deal(11, 4) == (3, 3, 3, 2)
    assert deal(2, 4) == (1, 1)


@pytest.mark.parametrize("height", [1, 2, 6, 40, 42])
@pytest.mark.parametrize("most", [0, 1, 4, 5, 40, 100])
@pytest.mark.parametrize("unit", [1, 2])
def test_bands_cover_the_piece_in_whole_units(height: int, most: int, unit: int) -> None:
    if height % unit:
        return
    parts = bands(height, most, unit)
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(height))
    sizes = [part.stop - part.start for part in parts]
    assert all(size % unit == 0 for size in sizes)
    assert max(sizes) <= max(most, unit)


def test_bands_are_as_few_as_can_be() -> None:
    assert bands(64, 100) == (slice(0, 64),)
    assert bands(64, 63) == (slice(0, 32), slice(32, 64))
