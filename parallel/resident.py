"""Resident weights with a role, their micro views, and the projection that refuses a weight without one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from .collectives import Partial
from .slicing import WeightRole
from .waiting import CollectiveError

_MICRO_DIM: dict[WeightRole, int | None] = {"column_parallel": 0, "vocab_parallel": 0, "row_parallel": 1, "replicated": None}


@dataclass(frozen=True)
class Weight:
    """A resident matrix ``[rows, columns]`` and how it is split. ``site`` names its projection in errors and in the ledger."""

    tensor: torch.Tensor
    role: WeightRole
    site: str

    def micro(self, micro: int | None, micro_count: int) -> Weight:
        """The part used while every rank works in one TP group: a view, never a copy. None: the whole shard."""
        dim = _MICRO_DIM[self.role]
        if micro is None or dim is None:
            return self
        width = self.tensor.shape[dim] // micro_count
        return replace(self, tensor=self.tensor.narrow(dim, micro * width, width))


def project(x: torch.Tensor, weight: Weight) -> torch.Tensor | Partial:
    """``x [T, columns]`` times ``weight`` transposed. A row-parallel weight gives a :class:`Partial`, the others a tensor ``[T, rows]``.

    Raises:
        CollectiveError: the weight is a bare tensor: without a role nobody would know whether the product must be reduced.
    """
    if not isinstance(weight, Weight):
        raise CollectiveError(f"a projection got a bare {type(weight).__name__} of shape {list(weight.shape)} without a role; wrap it in Weight")
    if isinstance(x, Partial):
        raise CollectiveError(f"{weight.site} got the unreduced product of {x.site}; call row_reduce first")
    product = F.linear(x, weight.tensor)
    return Partial(product, weight.site) if weight.role == "row_parallel" else product
