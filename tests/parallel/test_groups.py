"""What the groups refuse; that real ranks get the right ones is shown in test_collective_ranks.py and test_section.py."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from phase_parallel.parallel.groups import ProcessGroups, gloo_limit
from phase_parallel.parallel.plan import make_plan


def create(device_type: str = "cpu", **plan: object) -> ProcessGroups:
    return ProcessGroups.create(make_plan(**plan), store=None, generation=1, device=torch.device(device_type), timeout_s=5.0)


def test_world_of_one_has_no_groups() -> None:
    groups = create(name="single", world_size=1)
    assert groups.control is None and groups.for_ranks((0,)) is None
    assert not dist.is_initialized()


@pytest.mark.parametrize(("device_type", "backend"), [("cpu", "gloo"), ("cuda", "nccl")])
def test_backend_follows_the_device(device_type: str, backend: str) -> None:
    assert create(device_type, name="single", world_size=1).backend == backend


def test_several_ranks_need_a_store() -> None:
    with pytest.raises(ValueError, match=r"^plan tp with 4 ranks needs a rendezvous store; start the ranks with the launcher$"):
        create(name="tp", world_size=4)


def test_only_the_plans_own_groups_exist() -> None:
    groups = ProcessGroups(make_plan("tp", world_size=4), {(0, 1, 2, 3): "everyone"}, None, "gloo")
    assert groups.for_ranks((2, 0, 3, 1)) == "everyone", "order belongs to the topology, not to the group"
    assert groups.for_ranks((2,)) is None
    with pytest.raises(KeyError, match=r"ranks \(0, 2\) form no group of plan tp; groups are made once, at start-up"):
        groups.for_ranks((0, 2))


def test_destroyed_groups_are_not_used() -> None:
    groups = create(name="single", world_size=1)
    groups.destroy()
    groups.destroy()
    assert not groups.alive
    for use in (lambda: groups.control, lambda: groups.for_ranks((0,))):
        with pytest.raises(RuntimeError, match=r"these process groups were destroyed after a fault; open a new section first"):
            use()


class Group:
    """Stands for a group of NCCL, which knows no CPU; ``log`` says what was asked for, in order."""

    def __init__(self, log: list[str], failure: str = ""):
        self.log, self.failure = log, failure

    def abort(self) -> None:
        self.log.append("abort")
        if self.failure:
            raise RuntimeError(self.failure)


@pytest.mark.parametrize("failure", ["", "the driver is gone"])
@pytest.mark.parametrize(("backend", "want"), [("nccl", ["abort", "destroy"]), ("gloo", ["destroy"])])
def test_kernels_that_wait_end_before_the_groups(backend: str, want: list[str], failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: log.append("destroy"))
    groups = ProcessGroups(make_plan("tp", world_size=2), {(0, 1): Group(log, failure)}, None, backend)
    with pytest.raises(RuntimeError, match=failure) if failure and backend == "nccl" else nullcontext():
        groups.abort()
    assert log == want and not groups.alive


def test_groups_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of one group waits for the device, on which a kernel of another one may still wait for its peer."""
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    together = threading.Barrier(3)
    waiting = SimpleNamespace(abort=lambda: together.wait(timeout=5))
    groups = ProcessGroups(make_plan("hybrid", world_size=4), {(0, 1): waiting, (0, 1, 2, 3): waiting, (0, 2): waiting}, None, "nccl")
    groups.abort()
    assert not together.broken


def test_kernels_are_ended_once() -> None:
    """The monitor's thread may have ended them before the main thread does."""
    log: list[str] = []
    groups = ProcessGroups(make_plan("tp", world_size=2), {(0, 1): Group(log)}, None, "nccl")
    groups.end_kernels()
    groups.abort()
    assert log == ["abort"]


@pytest.mark.parametrize("own", [0.5, 5.0, 20.0, 60.0])
def test_gloo_gives_up_later_than_the_ranks_own_limit(own: float) -> None:
    assert gloo_limit(own).total_seconds() > own, "else gloo's sentence, which names nobody, may come first"
