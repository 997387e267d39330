"""Memory of each rank that its peers' kernels can write: the only module that opens it.

Every process sees one GPU, so each calls its own device 0; PyTorch's symmetric memory takes that for one device used twice unless it is told not to
look. Multicast stays off: nothing here needs it, and a program that dies while it uses it can disturb other programs of the machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .collectives import Communicator
from .faults import describe_cause, name_ranks

_SETTINGS = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


class PeerMemoryError(RuntimeError):
    """Peers' memory cannot be opened here; the sentence says why, and another way of reducing must be used."""


@dataclass(frozen=True)
class PeerMemory:
    """``addresses`` int64 ``[ranks]`` on the device: every rank's block as this process sees it, in the order that was asked for. ``block`` is this
    rank's own, zeroed before any peer could write. The blocks live as long as this object."""

    addresses: torch.Tensor
    block: torch.Tensor
    handle: object


def prepare_symmetric_memory() -> None:
    """Settings that PyTorch's symmetric memory reads from the environment, before anybody opens it."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)


class Openings:
    """How often this process has begun to open peers' memory, and how often it came to the end.

    PyTorch counts the exchanges of its rendezvous in each process and looks for the peers under that number. Where one rank broke off or stayed away
    the numbers differ until the processes end, and every later rendezvous would wait in vain for the store's limit.
    """

    def __init__(self) -> None:
        self.begun = self.ended = 0


_openings = Openings()


def process_openings() -> Openings:
    return _openings


@contextmanager
def opening_together(comm: Communicator, obstacle: str) -> Iterator[None]:
    """Collective over all ranks: the body, in which peers' memory is opened, runs on all of them or on none. ``obstacle``: why this rank cannot, empty
    when it is ready.

    Makes one control gather, whatever happens. Raises PeerMemoryError on every rank.
    """
    openings = process_openings()
    rows = comm.control_gather([int(not obstacle), openings.begun, openings.ended])
    if obstacle:
        raise PeerMemoryError(obstacle)
    behind = tuple(rank for rank, (ready, _, _) in enumerate(rows) if not ready)
    if behind:
        raise PeerMemoryError(f"{name_ranks(behind)} could not prepare it")
    most = max(begun for _, begun, _ in rows)
    broken = tuple(rank for rank, (_, begun, ended) in enumerate(rows) if not begun == ended == most)
    if broken:
        raise PeerMemoryError(f"opening it broke off on {name_ranks(broken)} before, and only a restart of the ranks brings it back")
    openings.begun += 1
    yield
    openings.ended += 1


def open_peer_memory(comm: Communicator, ranks: tuple[int, ...], nbytes: int, device: torch.device) -> PeerMemory:
    """Collective over all ranks, each with the ``ranks`` of its own group, at least two. Makes one control gather, however it ends. Raises
    PeerMemoryError on the rank where it fails; peers may then have succeeded, so ask them."""
    block, obstacle = None, ""
    try:
        block = _allocate(nbytes, device)
    except PeerMemoryError as error:
        obstacle = str(error)
    with opening_together(comm, obstacle):
        assert block is not None
        handle, addresses = _meet_peers(comm, ranks, block)
    return PeerMemory(addresses, block, handle)


def _allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """This rank's block, zeroed."""
    if device.type != "cuda":
        raise PeerMemoryError("peers' memory needs CUDA devices")
    prepare_symmetric_memory()
    try:
        import torch.distributed._symmetric_memory as symmetric

        block = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        block.zero_()
        torch.cuda.synchronize(device)
    except (ImportError, RuntimeError, AttributeError) as error:
        raise PeerMemoryError(describe_cause(error)) from error
    return block


def _meet_peers(comm: Communicator, ranks: tuple[int, ...], block: torch.Tensor) -> tuple[object, torch.Tensor]:
    """The rendezvous: PyTorch's handle, and the addresses of the blocks."""
    try:
        import torch.distributed._symmetric_memory as symmetric

        group = comm.groups.for_ranks(ranks)
        assert group is not None
        handle = symmetric.rendezvous(block, group.group_name)
        if handle is None:
            raise PeerMemoryError("the devices have no peer access to each other")
        order = [dist.get_group_rank(group, rank) for rank in ranks]
        addresses = torch.tensor([handle.buffer_ptrs[place] for place in order], dtype=torch.int64, device=block.device)
    except (ImportError, RuntimeError, AttributeError) as error:
        raise PeerMemoryError(describe_cause(error)) from error
    return handle, addresses
