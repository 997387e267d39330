"""All micro shards of a layer's experts as one base and strides, for kernels that walk over them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from .moe import ExpertBlock


@dataclass(frozen=True)
class MicroViews:
    """``w1 [E, 2·I, H]`` and ``w2 [E, H, I]`` of the first of ``micros`` micro shards; strides to the next one are counted in elements."""

    w1: torch.Tensor
    w2: torch.Tensor
    micros: int
    width: int
    w1_micro_stride: int
    w2_micro_stride: int

    @classmethod
    def of(cls, blocks: tuple[ExpertBlock, ...]) -> MicroViews:
        """``micro_major`` blocks are equally spaced views of one tensor; one block may hold several micro shards side by side."""
        if any(tensor.stride(-1) != 1 for block in blocks for tensor in (block.w1, block.w2)):
            raise ValueError("expert weights must have contiguous columns")
        first = blocks[0]
        width = first.w2.shape[2] // first.micros
        if len(blocks) == 1:
            return cls(first.w1, first.w2, first.micros, width, 2 * width * first.w1.stride(1), width)
        strides = []
        for name in ("w1", "w2"):
            places = [getattr(block, name).data_ptr() for block in blocks]
            steps = {after - before for before, after in pairwise(places)}
            if len(steps) != 1 or any(block.micros != 1 for block in blocks):
                raise ValueError("expert blocks of several micro shards must be equally spaced views of one tensor")
            strides.append(steps.pop() // first.w1.element_size())
        return cls(first.w1, first.w2, len(blocks), width, *strides)


@dataclass(frozen=True)
class WeightRows:
    """One of the two stacked weights, all experts and micro shards, seen as one matrix ``[rows, columns]`` whose rows are ``row_stride`` elements apart.

    Expert e of micro shard m starts at row ``e · expert_rows + m · micro_rows``, column ``m · micro_columns``.
    """

    base: torch.Tensor
    rows: int
    columns: int
    row_stride: int
    expert_rows: int
    micro_rows: int
    micro_columns: int

    @classmethod
    def of(cls, stacked: torch.Tensor, height: int, width: int, micros: int, micro_stride: int) -> WeightRows | None:
        """``stacked [E, …]`` as in :class:`MicroViews`; one expert of one micro shard is ``[height, width]``. None where no such matrix fits."""
        expert_stride, row_stride, _ = stacked.stride()
        micro_rows, micro_columns = divmod(micro_stride, row_stride)
        columns = (micros - 1) * micro_columns + width
        if expert_stride % row_stride or columns > row_stride:
            return None
        expert_rows = expert_stride // row_stride
        rows = (stacked.shape[0] - 1) * expert_rows + (micros - 1) * micro_rows + height
        return cls(stacked, rows, columns, row_stride, expert_rows, micro_rows, micro_columns)

    @property
    def aligned(self) -> bool:
        """A tensor descriptor takes bases and rows at multiples of 16 bytes."""
        return self.base.data_ptr() % 16 == 0 and self.row_stride * self.base.element_size() % 16 == 0


def matrices(views: MicroViews) -> tuple[WeightRows | None, WeightRows | None]:
    """Both weights as the matrices that the copy engine sees; None where there is no such matrix."""
    hidden = views.w1.shape[2]
    up = WeightRows.of(views.w1, 2 * views.width, hidden, views.micros, views.w1_micro_stride)
    return up, WeightRows.of(views.w2, hidden, views.width, views.micros, views.w2_micro_stride)
