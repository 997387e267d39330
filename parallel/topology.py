"""Who talks to whom in one phase, from one rank's point of view."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Phase = Literal["prefill", "decode", "denoise"]
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True)
class Topology:
    """One rank's groups in one phase. All ``*_ranks`` are physical ranks in the order that ordered gathers use."""

    phase: Phase
    tp_ranks: tuple[int, ...]
    tp_rank: int
    sp_ranks: tuple[int, ...]
    sp_rank: int
    cfg_ranks: tuple[int, ...]
    cfg_rank: int
    micro: int | None
    """Micro shard in use, or None when the whole resident shard is."""

    @property
    def tp_size(self) -> int:
        return len(self.tp_ranks)

    @property
    def sp_size(self) -> int:
        return len(self.sp_ranks)

    @property
    def cfg_size(self) -> int:
        return len(self.cfg_ranks)
