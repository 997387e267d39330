"""Process groups: the only module that creates or destroys them.

All groups of a plan are created together, once; a phase switch picks another group and creates none. A fault destroys them all (that
is what frees a peer that waits inside a collective) and the next section creates the next generation.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .last_resort import ending_process_after
from .plan import ParallelPlan

_CONNECTING_S = 30.0
GLOO_LATER_S = 5.0
_NCCL_LIMIT = timedelta(days=7)
"""Waits for NCCL have the limits of :mod:`.waiting` and :mod:`.device_watch`."""


def gloo_limit(timeout_s: float) -> timedelta:
    """A peer that never arrives must not hold this rank for gloo's default of 30 minutes. Where ranks wait they have the limit ``timeout_s`` of their own
    and say who stayed away; gloo, which cannot, comes later."""
    return timedelta(seconds=max(timeout_s + GLOO_LATER_S, 10.0))


class ProcessGroups:
    """The groups of one plan on one rank. ``create`` is collective: every rank calls it with the same plan and generation."""

    def __init__(
        self,
        plan: ParallelPlan,
        by_ranks: dict[tuple[int, ...], dist.ProcessGroup],
        control: dist.ProcessGroup | None,
        backend: str,
        generation: int = 0,
    ):
        self._plan = plan
        self._by_ranks = by_ranks
        self._control = control
        self.backend = backend
        self._generation = generation
        self._alive = True
        self._ending = threading.Lock()
        self._ended = False

    @classmethod
    def create(
        cls, plan: ParallelPlan, *, store: dist.Store | None, generation: int, device: torch.device, timeout_s: float
    ) -> ProcessGroups:
        """``store`` may be None only for a world of one, which needs no groups.

        Keys live below the generation's prefix, so nothing a dead generation left in the store is read again.
        """
        backend = "nccl" if device.type == "cuda" else "gloo"
        if plan.world_size == 1:
            return cls(plan, {}, None, backend, generation)
        if store is None:
            raise ValueError(f"plan {plan.name} with {plan.world_size} ranks needs a rendezvous store; start the ranks with the launcher")
        if dist.is_initialized():
            dist.destroy_process_group()
        # torch names groups by their number in this process, and forgets to count anew when the first one of all could not be made: ranks that had
        # got there would look for their peers under another name for ever.
        distributed_c10d._world.group_count = 0
        limit = gloo_limit(timeout_s)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"groups/{generation}", store),
            rank=plan.rank,
            world_size=plan.world_size,
            timeout=limit,
        )
        # PyTorch's own watchdog would end this process at its limit, or hold up whoever ends a group there; the faults of this pack end groups only.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        patience = _NCCL_LIMIT if backend == "nccl" else limit
        by_ranks = {}
        for ranks in plan.groups():
            # new_group is collective over the world, members or not, hence the same loop on every rank.
            group = dist.new_group(list(ranks), backend=backend, timeout=patience)
            if plan.rank in ranks:
                by_ranks[ranks] = group
        if backend == "nccl":
            _meet(by_ranks.values(), device, max(timeout_s, _CONNECTING_S))
        return cls(plan, by_ranks, dist.group.WORLD, backend, generation)

    @property
    def control(self) -> dist.ProcessGroup | None:
        """Gloo over all ranks, for host-side agreement; None in a world of one."""
        self._require_alive()
        return self._control

    def for_ranks(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Group of these physical ranks (any order), None when it is this rank alone."""
        self._require_alive()
        if len(ranks) == 1:
            return None
        key = tuple(sorted(ranks))
        if key not in self._by_ranks:
            raise KeyError(f"ranks {key} form no group of plan {self._plan.name}; groups are made once, at start-up")
        return self._by_ranks[key]

    @property
    def alive(self) -> bool:
        return self._alive

    @property
    def generation(self) -> int:
        """The one that they were made in, 0 once they are of no use."""
        return self._generation if self._alive and not self._ended else 0

    def _require_alive(self) -> None:
        if not self._alive:
            raise RuntimeError("these process groups were destroyed after a fault; open a new section first")

    def end_kernels(self) -> None:
        """NCCL's kernels that wait for a peer end now, with whatever they hold; the groups are of no use afterwards. Any thread may call it."""
        with self._ending:
            groups = [] if self._ended else list(self._by_ranks.values())
            self._ended = True
            if self.backend == "nccl" and groups:
                # All at once: to end one group NCCL frees memory, which waits for the whole device, and so for kernels of the next group.
                with ThreadPoolExecutor(len(groups), thread_name_prefix="phase-parallel-abort") as pool:
                    ended = [pool.submit(group.abort) for group in groups]
                for end in ended:
                    end.result()

    def abort(self) -> None:
        """As ``destroy``, and NCCL's kernels that wait for a peer end first: ``destroy`` alone would wait for them, and so for the peer."""
        try:
            self.end_kernels()
        finally:
            self.destroy()

    def destroy(self) -> None:
        """Close every connection at once; a peer that waits in a collective of these groups fails there. Never collective itself."""
        if not self._alive:
            return
        self._alive = False
        self._by_ranks.clear()
        self._control = None
        if self._plan.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _meet(groups: Iterable[dist.ProcessGroup], device: torch.device, limit_s: float) -> None:
    """NCCL connects at a group's first collective, and waits there for the others deaf to faults: so now, where all ranks are known to be here. Every
    rank takes its groups in the plan's order. A group that is not connected yet cannot be ended, so where a rank fails just here the others end."""
    with ending_process_after(limit_s, "connecting the ranks with NCCL"):
        for group in groups:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        torch.cuda.synchronize(device)
