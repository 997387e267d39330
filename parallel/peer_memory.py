"""Memory of each rank that its peers' kernels can write: the only module that opens it.

Every process sees one GPU, so each calls its own device 0; PyTorch's symmetric memory takes that for one device used twice unless it is told not to
look. Multicast stays off: nothing here needs it, and a program that dies while it uses it can disturb other programs of the machine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .collectives import Communicator

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


def open_peer_memory(comm: Communicator, ranks: tuple[int, ...], nbytes: int, device: torch.device) -> PeerMemory:
    """Collective over ``ranks``, at least two. Raises PeerMemoryError on the rank where it fails; peers may then have succeeded, so ask them."""
    if device.type != "cuda":
        raise PeerMemoryError("peers' memory needs CUDA devices")
    prepare_symmetric_memory()
    try:
        import torch.distributed._symmetric_memory as symmetric

        group = comm.groups.for_ranks(ranks)
        assert group is not None
        block = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        block.zero_()
        torch.cuda.synchronize(device)
        handle = symmetric.rendezvous(block, group.group_name)
        if handle is None:
            raise PeerMemoryError("the devices have no peer access to each other")
        order = [dist.get_group_rank(group, rank) for rank in ranks]
        addresses = torch.tensor([handle.buffer_ptrs[place] for place in order], dtype=torch.int64, device=device)
    except (ImportError, RuntimeError, AttributeError) as error:
        raise PeerMemoryError(str(error).splitlines()[0]) from error
    return PeerMemory(addresses, block, handle)
