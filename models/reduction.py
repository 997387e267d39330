"""How a decode step adds up the ranks' summands and completes its logits: through peers' memory, with our kernels or FlashInfer's, or with the process
group's collectives and a second kernel."""

from __future__ import annotations

from typing import Literal, Protocol

import torch

from ..kernels.peer_gather import gather_bytes
from ..kernels.peer_reduce import MAXIMUM_RANKS, Mailboxes, mailbox_bytes, reduce_residual_norm
from ..kernels.residual_norm import residual_norm_triton
from ..parallel.abort_word import AbortWord
from ..parallel.collectives import Communicator, Partial, PhaseView
from ..parallel.peer_memory import PeerMemory, PeerMemoryError, open_peer_memory
from ..parallel.resident import Weight
from ..parallel.waiting import CollectiveTimeout
from .decode_head import GroupHead, Head, PeerHead
from .flashinfer_reduction import open_flashinfer_reduction, why_not_flashinfer_reduction

ReductionChoice = Literal["auto", "peer", "group", "flashinfer"]
SELF_TEST_ROUNDS = 16
SELF_TEST_ROWS = 5
CACHE_LINE = 128
_ASKED_FOR = {"peer": "peer memory", "flashinfer": "FlashInfer's all-reduce"}


class Reduction(Protocol):
    """``residual [H] += sum over the ranks of partial``; ``normed [H]`` = RMSNorm of it with ``weight [H]``."""

    name: str
    failed: torch.Tensor | None
    """int32 ``[1]`` on the device, not 0 once a peer did not come to a reduction; None where the reduction itself raises."""

    def __call__(self, view: PhaseView, partial: Partial, residual: torch.Tensor, weight: torch.Tensor, eps: float, normed: torch.Tensor) -> None: ...

    def head(self, view: PhaseView, lm_head: Weight, vocab_start: int, vocab: int) -> Head:
        """For the end of every step: this rank's rows of the head begin at ``vocab_start`` of ``vocab``."""
        ...

    def require(self, failed: int) -> None:
        """Raises CollectiveTimeout when ``failed``, as read from the device, is not 0."""
        ...


class GroupReduction:
    """The process group's all-reduce (none for a group of one), then one kernel."""

    name = "group"
    failed = None

    def __call__(self, view: PhaseView, partial: Partial, residual: torch.Tensor, weight: torch.Tensor, eps: float, normed: torch.Tensor) -> None:
        residual_norm_triton(view.row_reduce(partial), residual, weight, eps, normed)

    def head(self, view: PhaseView, lm_head: Weight, vocab_start: int, vocab: int) -> Head:
        return GroupHead(view, lm_head, vocab)

    def require(self, failed: int) -> None:
        """A process group raises by itself."""


class PeerReduction:
    """One kernel through the mailboxes of the tensor-parallel group; no process group has a part in a step, so none can hold one up."""

    name = "peer memory"

    def __init__(self, memory: PeerMemory, rank: int, mailbox: int, *, timeout_s: float, abort: AbortWord):
        """``rank``: this rank's place among ``memory.addresses``; ``mailbox``: bytes of each block in front of those for the logits. Once ``abort`` is
        set, nothing waits for a peer, whatever ``timeout_s``."""
        self._memory, self._mailbox = memory, mailbox
        device = memory.addresses.device
        calls, meetings, failed = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(3))
        self._boxes = Mailboxes(memory.addresses, rank, calls, failed, abort.tensor)
        self._logits = Mailboxes(memory.addresses + mailbox, rank, meetings, failed, abort.tensor)
        self._timeout_s = timeout_s
        self.failed = failed

    def __call__(self, view: PhaseView, partial: Partial, residual: torch.Tensor, weight: torch.Tensor, eps: float, normed: torch.Tensor) -> None:
        view.row_reduce_with(
            partial, lambda summand: reduce_residual_norm(self._boxes, summand, residual, weight, eps, normed, timeout_s=self._timeout_s)
        )

    def head(self, view: PhaseView, lm_head: Weight, vocab_start: int, vocab: int) -> Head:
        return PeerHead(self._logits, self._memory.block[self._mailbox :], view, lm_head, vocab_start, vocab, self._timeout_s)

    def require(self, failed: int) -> None:
        if failed:
            raise CollectiveTimeout(f"a peer did not join a reduction of the decode step within {self._timeout_s:.0f} s")


def choose_reduction(
    comm: Communicator, hidden: int, vocab: int, dtype: torch.dtype, device: torch.device, choice: ReductionChoice = "auto"
) -> tuple[Reduction, str]:
    """Collective over all ranks: the reduction that all of them will use, and why in one sentence.

    ``auto`` opens peers' memory and lets it add known numbers; unless every rank reads the right sum, all use the process group. ``flashinfer`` is
    never taken by itself.

    Raises:
        PeerMemoryError: ``peer`` or ``flashinfer`` was asked for and does not work.
    """
    ranks = comm.plan.topology("decode").tp_ranks
    if len(ranks) == 1:
        return GroupReduction(), "one rank: nothing to reduce"
    if choice == "group":
        return GroupReduction(), "process group: chosen"
    reason, reduction = "", None
    try:
        if choice == "flashinfer":
            reduction = open_flashinfer_reduction(comm, ranks, hidden, dtype, device)
        else:
            reduction = _open_peer_reduction(comm, ranks, hidden, vocab, dtype, device)
    except PeerMemoryError as error:
        reason = str(error)
    # Nobody may write before every block is open, and nobody goes on alone.
    opened = all(flag == 1 for (flag,) in comm.control_gather([int(reduction is not None)]))
    right = opened and _self_test(reduction, comm, hidden, vocab, dtype, device)
    if all(flag == 1 for (flag,) in comm.control_gather([int(right)])):
        return reduction, f"{reduction.name}: its sums passed the self-test on all ranks"
    reason = reason or ("its self-test gave a wrong sum" if opened else "another rank could not open it")
    if choice != "auto":
        raise PeerMemoryError(f"{_ASKED_FOR[choice]} cannot be used: {reason}; choose reduction auto or group")
    return GroupReduction(), f"process group: peer memory cannot be used, {reason}"


def why_not_reduction(device: torch.device, choice: ReductionChoice) -> str | None:
    """What can be known on one rank before anything is loaded: the sentence that refuses ``choice``, or None."""
    reason = why_not_flashinfer_reduction(device) if choice == "flashinfer" else None
    return reason and f"{_ASKED_FOR[choice]} cannot be used: {reason}; or choose reduction auto"


def peer_block_bytes(ranks: int, hidden: int, vocab: int, itemsize: int) -> tuple[int, int]:
    """Bytes of one rank's mailbox, padded to a cache line, and of its whole block, in which room for the logits follows."""
    mailbox = -(-mailbox_bytes(ranks, hidden, itemsize) // CACHE_LINE) * CACHE_LINE
    return mailbox, mailbox + gather_bytes(vocab)


def _open_peer_reduction(
    comm: Communicator, ranks: tuple[int, ...], hidden: int, vocab: int, dtype: torch.dtype, device: torch.device
) -> PeerReduction:
    if len(ranks) > MAXIMUM_RANKS:  # on all ranks, so that none of them goes on to an agreement
        raise PeerMemoryError(f"the kernel takes {MAXIMUM_RANKS} ranks at most")
    mailbox, whole = peer_block_bytes(len(ranks), hidden, vocab, dtype.itemsize)
    memory = open_peer_memory(comm, ranks, whole, device)
    return PeerReduction(memory, comm.phase("decode").topology.tp_rank, mailbox, timeout_s=comm.timeout_s, abort=comm.abort_word)


def _self_test(reduction: Reduction, comm: Communicator, hidden: int, vocab: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whole numbers that every format adds exactly; each rank and each round contributes its own sums, and its own part of a vector."""
    view = comm.phase("decode")
    rank, ranks = view.topology.tp_rank, view.topology.tp_size
    column = torch.arange(hidden, device=device) % 7
    ones, normed = torch.ones(hidden, dtype=dtype, device=device), torch.empty(hidden, dtype=dtype, device=device)
    good = True
    for number in range(SELF_TEST_ROUNDS):
        residual = torch.zeros(hidden, dtype=dtype, device=device)
        reduction(view, Partial((column + rank + number).to(dtype), "self-test"), residual, ones, 1e-5, normed)
        want = column * ranks + ranks * (ranks - 1) // 2 + ranks * number
        good = good and torch.equal(residual, want.to(dtype))
        # After the sum, as in a step: a head of few rows whose first column alone is not zero.
        rows = min(SELF_TEST_ROWS, vocab // ranks)
        part = torch.zeros(rows, hidden, dtype=dtype, device=device)
        part[:, 0] = torch.arange(rows, device=device) + number + rank * rows
        head = reduction.head(view, Weight(part, "vocab_parallel", "self-test"), rank * rows, rows * ranks)
        head(ones)
        good = good and torch.equal(head.logits, torch.arange(rows * ranks, device=device).float() + number)
    return good and not (reduction.failed is not None and int(reduction.failed))
