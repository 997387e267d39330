"""One rank of a plan without its peers: every collective returns this rank's own data in the right shape.

For measuring what one device computes and holds; the numbers mean nothing, and the time of the collectives is missing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..parallel.collectives import Communicator
from ..parallel.groups import ProcessGroups
from ..parallel.plan import ParallelPlan, Phase


class OneRankCommunicator(Communicator):
    """A communicator of ``plan.rank`` whose peers would all hold the same as this rank."""

    def __init__(self, plan: ParallelPlan):
        super().__init__(plan, ProcessGroups(plan, {}, None, "alone"))

    def control_gather(self, values: Sequence[int]) -> list[list[int]]:
        return [list(values) for _ in range(self.plan.world_size)]

    def broadcast(self, tensor: torch.Tensor, site: str, phase: Phase | None = None) -> torch.Tensor:
        self.ledger.record(phase or "section", "broadcast", site, tensor.shape, str(tensor.dtype))
        return tensor

    def sum(self, summand: torch.Tensor, ranks: tuple[int, ...], site: str) -> torch.Tensor:
        return summand

    def gather(self, tensor: torch.Tensor, ranks: tuple[int, ...], site: str) -> list[torch.Tensor]:
        return [tensor] * len(ranks)

    def all_to_all(self, chunks: torch.Tensor, ranks: tuple[int, ...], site: str) -> torch.Tensor:
        return chunks.clone()
