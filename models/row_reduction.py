"""How a step of a picture adds up the ranks' summands: through peers' memory where two ranks share them, or with the process group's all-reduce and a
second kernel. Chosen together and tested first, as in :mod:`.reduction`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from ..kernels.kernel_set import KernelSet
from ..kernels.peer_reduce import Mailboxes
from ..kernels.peer_rows import RANKS, ROWS, programs_of, reduce_rows, row_block_bytes
from ..parallel.collectives import Communicator, Partial, PhaseView
from ..parallel.peer_memory import PeerMemory, PeerMemoryError, open_peer_memory
from ..parallel.waiting import CollectiveTimeout
from .reduction import ReductionChoice

# Rows of one call, more than both guidance branches of a 1024 x 1024 picture have: 168 MB of each rank at the release's sizes.
CAPACITY = 10240
SELF_TEST_ROWS = (1, ROWS + 1, 2051)
SELF_TEST_ROUNDS = 6

ResidualNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]


class RowReduction(Protocol):
    """``residual [T, H]`` + the sum over the ranks of ``partial``, which may be written over ``residual``, and RMSNorm of it with ``weight [H]``."""

    name: str
    recordable: bool
    """Whether a CUDA graph may hold it: groups cannot end before a graph that holds their collectives."""

    def __call__(
        self, view: PhaseView, partial: Partial, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def follow(self) -> None:
        """Behind a step: whether its sums are right will be known to :meth:`require` once the device has got here. Nobody waits."""
        ...

    def require(self) -> None:
        """Raises CollectiveTimeout when a sum of the steps that the device has ended is known to be wrong."""
        ...


class GroupRows:
    """The process group's all-reduce (none for a group of one), then the residual and the norm. A process group raises by itself."""

    name = "group"
    recordable = False

    def __init__(self, residual_norm: ResidualNorm):
        self._residual_norm = residual_norm

    def __call__(
        self, view: PhaseView, partial: Partial, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._residual_norm(view.row_reduce(partial), residual, weight, eps)

    def follow(self) -> None:
        """Nothing is left to be known."""

    def require(self) -> None:
        """As above."""


class PeerRows:
    """One kernel through the blocks of two ranks; no process group has a part in it."""

    name = "peer memory"
    recordable = True

    def __init__(self, comm: Communicator, memory: PeerMemory, rank: int, programs: int, capacity: int):
        """``rank``: this rank's place among ``memory.addresses``, whose blocks hold ``capacity`` rows. ``programs``: the same on both ranks."""
        device = memory.addresses.device
        calls, failed = (torch.zeros(count, dtype=torch.int32, device=device) for count in (programs, 1))
        self._memory, self._comm, self._capacity = memory, comm, capacity
        self._boxes = Mailboxes(memory.addresses, rank, calls, failed, comm.abort_word.tensor)
        # What failed stays so; a copy that comes late or twice tells the same.
        self.known = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")

    def __call__(
        self, view: PhaseView, partial: Partial, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = torch.empty_like(residual)

        def reduce(summand: torch.Tensor) -> None:
            reduce_rows(
                self._boxes, summand, residual, weight, eps, normed, capacity=self._capacity, timeout_s=self._comm.timeout_s
            )

        view.row_reduce_with(partial, reduce)
        return residual, normed

    def follow(self) -> None:
        self.known.copy_(self._boxes.failed, non_blocking=True)

    def require(self) -> None:
        if int(self.known):
            self._comm.fault_check()  # a peer's fault also ends reductions, and names the cause
            raise CollectiveTimeout(f"a peer did not join a reduction of the picture's step within {self._comm.timeout_s:.0f} s")


def choose_row_reduction(
    comm: Communicator, kernels: KernelSet, hidden: int, dtype: torch.dtype, device: torch.device, choice: ReductionChoice = "auto"
) -> tuple[RowReduction, str]:
    """Collective over all ranks: what all of them will use for the steps of a picture, and why in one sentence. ``choice`` is made for the text and
    counts here where it is ``group``; nothing else is refused, since only two ranks can add up many rows through peers' memory."""
    topology = comm.plan.topology("denoise")
    group = GroupRows(kernels.residual_norm)
    if topology.tp_size == 1:
        return group, "one rank: nothing to reduce"
    if topology.tp_size != RANKS:
        return group, f"process group: peer memory adds up the rows of {RANKS} ranks, and here they are {topology.tp_size}"
    if choice == "group":
        return group, "process group: chosen"
    # All or none go on to open it, whatever kernels a rank has.
    programs = min(count for (count,) in comm.control_gather([_own_programs(comm, kernels, device)]))
    if not programs:
        return group, "process group: peer memory needs fused kernels and NCCL on every rank"
    reason, reduction = "", None
    try:
        memory = open_peer_memory(comm, topology.tp_ranks, row_block_bytes(CAPACITY, hidden, dtype.itemsize), device)
        reduction = PeerRows(comm, memory, topology.tp_rank, programs, CAPACITY)
    except PeerMemoryError as error:
        reason = str(error)
    # Nobody may write before every block is open, and nobody goes on alone.
    opened = all(flag == 1 for (flag,) in comm.control_gather([int(reduction is not None)]))
    right = opened and _self_test(reduction, comm, hidden, dtype, device)
    if all(flag == 1 for (flag,) in comm.control_gather([int(right)])):
        return reduction, "peer memory: its sums passed the self-test on all ranks"
    reason = reason or ("its self-test gave a wrong sum" if opened else "another rank could not open it")
    return group, f"process group: peer memory cannot be used, {reason}"


def _own_programs(comm: Communicator, kernels: KernelSet, device: torch.device) -> int:
    """0 where this rank cannot."""
    return programs_of(device) if comm.groups.backend == "nccl" and kernels.name == "fused" else 0


def _self_test(reduction: PeerRows, comm: Communicator, hidden: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whole numbers that every format adds exactly; each rank, each round, each row and each column contributes its own."""
    view = comm.phase("denoise")
    rank, ones = view.topology.tp_rank, torch.ones(hidden, dtype=dtype, device=device)
    column = (torch.arange(hidden, device=device) % 7).to(dtype)
    good = True
    for number in range(SELF_TEST_ROUNDS):
        for count in SELF_TEST_ROWS:
            mine = column + (torch.arange(count, device=device) % 11).to(dtype).unsqueeze(1) + number
            residual, _ = reduction(view, Partial(mine + rank, "self-test"), torch.zeros_like(mine), ones, 1e-5)
            good = good and torch.equal(residual, 2 * mine + 1)
    reduction.follow()
    comm.await_device("the self-test of peer memory")
    return good and not int(reduction.known)
