"""One rank of a plan without its peers: every collective returns this rank's own data in the right shape.

For measuring what one device computes and holds; the numbers mean nothing, and the time of the collectives is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from ..parallel.collectives import Communicator
from ..parallel.groups import ProcessGroups
from ..parallel.plan import ParallelPlan, Phase

CollectiveKind = Literal["all_reduce", "all_gather", "all_to_all"]


class Transfer(NamedTuple):
    """A collective that was left out; ``nbytes`` of this rank's tensor."""

    kind: CollectiveKind
    ranks: int
    nbytes: int


class OneRankCommunicator(Communicator):
    """A communicator of ``plan.rank`` whose peers would all hold the same as this rank. ``left_out`` counts what they would have exchanged."""

    def __init__(self, plan: ParallelPlan):
        super().__init__(plan, ProcessGroups(plan, {}, None, "alone"))
        self.left_out: Counter[Transfer] = Counter()

    def _count(self, kind: CollectiveKind, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        if len(ranks) > 1:
            self.left_out[Transfer(kind, len(ranks), tensor.nbytes)] += 1

    def control_gather(self, values: Sequence[int]) -> list[list[int]]:
        return [list(values) for _ in range(self.plan.world_size)]

    def broadcast(self, tensor: torch.Tensor, site: str, phase: Phase | None = None) -> torch.Tensor:
        self.ledger.record(phase or "section", "broadcast", site, tensor.shape, str(tensor.dtype))
        return tensor

    def sum(self, summand: torch.Tensor, ranks: tuple[int, ...], site: str) -> torch.Tensor:
        self._count("all_reduce", summand, ranks)
        return summand

    def gather(self, tensor: torch.Tensor, ranks: tuple[int, ...], site: str) -> list[torch.Tensor]:
        self._count("all_gather", tensor, ranks)
        return [tensor] * len(ranks)

    def all_to_all(self, chunks: torch.Tensor, ranks: tuple[int, ...], site: str) -> torch.Tensor:
        self._count("all_to_all", chunks, ranks)
        return chunks.clone()
