"""Row tiles of grouped products: each expert's pairs are cut into tiles, and a program finds its own from the experts' ends alone."""

from __future__ import annotations

from dataclasses import dataclass

from .triton_support import jit, tl


@dataclass(frozen=True)
class Tile:
    """Sizes of one grouped product: rows of pairs, columns, depth of one step, warps, stages of the pipeline."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def tiles_at_most(pairs: int, experts: int, tile: Tile) -> int:
    """Each expert may end in the middle of a tile."""
    return min(-(-pairs // tile.rows) + experts, pairs)


@jit
def find_tile(ends, experts, E: tl.constexpr, BM: tl.constexpr):
    """Expert, first and last (exclusive) pair of tile ``program_id(1)``; the expert is E for tiles behind the last one."""
    tile = tl.program_id(1)
    number = tl.arange(0, E)
    end = tl.load(ends + number, mask=number < experts, other=0)
    start = tl.load(ends + number - 1, mask=(number > 0) & (number < experts), other=0)
    tiles = tl.where(number < experts, (end - start + BM - 1) // BM, 0)
    last_tile = tl.cumsum(tiles, axis=0)
    expert = tl.sum((last_tile <= tile).to(tl.int32), axis=0)
    mine = number == expert
    first = tl.sum(tl.where(mine, start + (tile - last_tile + tiles) * BM, 0), axis=0)
    last = tl.sum(tl.where(mine, end, 0), axis=0)
    return expert, first, last
