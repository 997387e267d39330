"""N ranks as threads of one process: every rank of any plan runs the real model code, and starting them costs nothing.

The collectives exchange tensors between the threads under the plan's own groups; what gloo itself does is tested with real processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from phase_parallel.parallel.collectives import Communicator
from phase_parallel.parallel.groups import ProcessGroups
from phase_parallel.parallel.plan import ParallelPlan, make_plan

Result = TypeVar("Result")
_TIMEOUT_S = 60.0


class ThreadWorld:
    """What the threads share: one meeting point for every group of ranks."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self._lock = threading.Lock()
        self._barriers: dict[tuple[int, ...], threading.Barrier] = {}
        self._given: dict[tuple[int, ...], dict[int, Any]] = {}
        self._broken = False

    def exchange(self, rank: int, ranks: Sequence[int], value: Any) -> list[Any]:
        """What every one of ``ranks`` gave, in that order."""
        key = tuple(sorted(ranks))
        with self._lock:
            barrier = self._barriers.setdefault(key, threading.Barrier(len(key)))
            given = self._given.setdefault(key, {})
            if self._broken:
                barrier.abort()
        given[rank] = value
        barrier.wait(_TIMEOUT_S)
        values = [given[other] for other in ranks]
        barrier.wait(_TIMEOUT_S)
        return values

    def abort(self) -> None:
        with self._lock:
            self._broken = True
            for barrier in self._barriers.values():
                barrier.abort()


class ThreadCommunicator(Communicator):
    """The real role checks, ledger and views over exchanges between threads."""

    def __init__(self, plan: ParallelPlan, world: ThreadWorld):
        super().__init__(plan, ProcessGroups(plan, {}, None, "gloo"))
        self._world = world

    def _exchange(self, ranks: tuple[int, ...], value: Any) -> list[Any]:
        assert tuple(sorted(ranks)) in self.plan.groups(), f"the plan makes no group of {ranks}"
        return self._world.exchange(self.plan.rank, ranks, value)

    def control_gather(self, values: Sequence[int]) -> list[list[int]]:
        everyone = tuple(range(self.plan.world_size))
        return self._world.exchange(self.plan.rank, everyone, list(values))

    def gather(self, tensor: torch.Tensor, ranks: tuple[int, ...], site: str) -> list[torch.Tensor]:
        if len(ranks) == 1:
            return [tensor]
        return [chunk.clone() for chunk in self._exchange(ranks, tensor.clone())]

    def all_to_all(self, chunks: torch.Tensor, ranks: tuple[int, ...], site: str) -> torch.Tensor:
        mine = ranks.index(self.plan.rank)
        return torch.stack([given[mine] for given in self._exchange(ranks, chunks.clone())])


def run_ranks(body: Callable[[ParallelPlan, Communicator], Result], name: str, **plan: Any) -> list[Result]:
    """``body(plan, communicator)`` on every rank of the plan; results by rank. The first rank's error is raised."""
    first = make_plan(name, **plan)
    world = ThreadWorld(first.world_size)
    results: list[Any] = [None] * first.world_size
    errors: list[tuple[int, BaseException]] = []

    def rank_body(rank: int) -> None:
        torch.set_num_threads(1)
        own = first.on_rank(rank)
        try:
            results[rank] = body(own, ThreadCommunicator(own, world))
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append((rank, error))
            world.abort()

    threads = [threading.Thread(target=rank_body, args=(rank,)) for rank in range(first.world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise min(errors, key=lambda item: item[0])[1]
    return results
