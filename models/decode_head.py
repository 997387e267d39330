"""How a decode step completes its logits: each rank multiplies with its rows of the head, and all ranks get all of them."""

from __future__ import annotations

from typing import Protocol

import torch

from ..kernels.gemv import gemv_triton
from ..kernels.peer_gather import gathered, gemv_gather
from ..kernels.peer_reduce import Mailboxes
from ..parallel.collectives import PhaseView
from ..parallel.resident import Weight


class Head(Protocol):
    """``x [H]`` times all ranks' rows of the head -> ``logits [V]`` fp32 in logical rank order, the same memory at every call."""

    logits: torch.Tensor

    def __call__(self, x: torch.Tensor) -> None: ...


class GroupHead:
    """Each rank's own logits, then the process group's gather."""

    def __init__(self, view: PhaseView, lm_head: Weight, vocab: int):
        self._view, self._lm_head = view, lm_head
        device = lm_head.tensor.device
        self._local = torch.zeros(lm_head.tensor.shape[0], device=device)
        self.logits = torch.zeros(vocab, device=device)

    def __call__(self, x: torch.Tensor) -> None:
        gemv_triton(x, self._lm_head.tensor, self._local)
        self._view.vocab_gather_into(self._local, self.logits, self._lm_head.site, order=self._view.topology.tp_ranks)


class PeerHead:
    """The product writes its rows into all ranks' memory, and the ranks meet."""

    def __init__(self, boxes: Mailboxes, block: torch.Tensor, view: PhaseView, lm_head: Weight, vocab_start: int, vocab: int, timeout_s: float):
        self._boxes, self._view, self._lm_head, self._first, self._timeout_s = boxes, view, lm_head, vocab_start, timeout_s
        self.logits = gathered(block)[:vocab]

    def __call__(self, x: torch.Tensor) -> None:
        weight, view = self._lm_head.tensor, self._view
        mine = self.logits[self._first : self._first + weight.shape[0]]
        view.vocab_gather_with(
            mine, self._lm_head.site, lambda: gemv_gather(self._boxes, x, weight, self._first, timeout_s=self._timeout_s), order=view.topology.tp_ranks
        )
