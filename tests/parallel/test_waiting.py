"""Waiting for a collective in short polls: what a poll's timeout means, and what it does not."""

from __future__ import annotations

import pytest
import torch

from phase_parallel.parallel.collectives import Communicator
from phase_parallel.parallel.groups import ProcessGroups
from phase_parallel.parallel.plan import make_plan
from phase_parallel.parallel.waiting import CollectiveError, CollectiveTimeout


class Work:
    """Gives up ``polls`` polls, then has completed, well or with ``failure``; the last poll gives up just before it completes."""

    def __init__(self, polls: int, failure: str | None = None):
        self.polls, self.failure = polls, failure

    def wait(self, timeout: object = None) -> bool:
        if self.polls > 0:
            self.polls -= 1
            raise RuntimeError("Operation timed out!")
        if self.failure is not None:
            raise RuntimeError(self.failure)
        return True

    def is_completed(self) -> bool:
        return self.polls == 0


def waiter(timeout_s: float = 60.0) -> Communicator:
    plan = make_plan("tp", world_size=2)
    return Communicator(plan, ProcessGroups(plan, {}, None, "gloo"), timeout_s=timeout_s)


@pytest.mark.parametrize("polls", [0, 1, 3])
def test_work_that_completes_just_after_a_poll_is_no_failure(polls: int) -> None:
    waiter().wait(Work(polls), "site")


@pytest.mark.parametrize("polls", [0, 1])
def test_a_peer_that_left_is_named_with_the_reason(polls: int) -> None:
    with pytest.raises(CollectiveError, match="a peer left the collective at site: Connection closed by peer"):
        waiter().wait(Work(polls, "Connection closed by peer [127.0.0.1]"), "site")


def test_a_peer_that_never_comes_is_a_timeout() -> None:
    with pytest.raises(CollectiveTimeout, match="a peer did not join the collective at site within 0 s"):
        waiter(timeout_s=0.0).wait(Work(1000), "site")


class Event:
    """Stands for a CUDA event, reached at the ``queries``-th look."""

    def __init__(self, queries: float = 1):
        self.queries, self.recorded = queries, False

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        self.queries -= 1
        return self.queries <= 0


NEVER = Event(float("inf"))


def test_a_device_that_is_slow_is_waited_for() -> None:
    waiter().await_event(Event(5), "its work")


def test_a_device_behind_a_peer_that_failed_is_not() -> None:
    comm = waiter()

    def told() -> None:
        raise KeyError("rank 1 has failed")

    comm.fault_check = told
    with pytest.raises(KeyError, match="rank 1 has failed"):
        comm.await_event(NEVER, "its work")


def test_nor_one_behind_a_peer_that_lives_and_never_comes() -> None:
    with pytest.raises(CollectiveTimeout, match=r"^the device did not finish its work within 0 s$"):
        waiter(timeout_s=0.01).await_event(NEVER, "its work")


@pytest.mark.parametrize(("name", "world_size", "backend", "looks"), [("tp", 2, "nccl", True), ("tp", 2, "gloo", False), ("single", 1, "nccl", False)])
def test_the_device_is_waited_for_where_peers_can_hold_it(name: str, world_size: int, backend: str, looks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    event = Event()
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plan = make_plan(name, world_size=world_size)
    Communicator(plan, ProcessGroups(plan, {}, None, backend)).await_device("its work")
    assert event.recorded is looks and event.queries == (0 if looks else 1)
