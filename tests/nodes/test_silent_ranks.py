"""A rank that does not answer: the queue waits until it is known whether it comes back, and the launcher is asked to end it if it does not."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from phase_parallel.nodes import silent_ranks
from phase_parallel.nodes.silent_ranks import SILENCE_S, SilentRanks
from phase_parallel.parallel.hung_ranks import HungRank, asked_to_end
from phase_parallel.parallel.store import JsonStore

TIMEOUT_S = 60.0


class Hearts:
    """Stands for the cluster: how long each rank has been silent."""

    timeout_s = TIMEOUT_S

    def __init__(self, silent_s: dict[int, float]):
        self.silent_s = silent_s

    def stale_ranks(self, limit_s: float) -> tuple[int, ...]:
        return tuple(rank for rank, seconds in self.silent_s.items() if seconds > limit_s)

    def records(self) -> list[dict | None]:
        return [{"pid": 100 + rank} for rank in range(4)]


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, silent_s: dict[int, float]):
        self.said: list[str] = []
        monkeypatch.setattr(silent_ranks, "freeze_queue", lambda: self.said.append("freeze"))
        monkeypatch.setattr(silent_ranks, "thaw_queue", lambda: self.said.append("thaw"))
        monkeypatch.setattr(silent_ranks, "BEAT_S", 0.1)
        monkeypatch.setattr(silent_ranks, "_ENDING_S", 0.5)
        self.cluster, self.store = Hearts(silent_s), JsonStore.in_process()
        self.ranks = SilentRanks(self.cluster, self.store)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 5.0
        while not condition():
            assert time.monotonic() < deadline, self.said
            time.sleep(0.01)


def test_all_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, {1: 0.5, 2: 1.0})
    assert not world.ranks.suspect()
    assert world.said == []


def test_a_rank_that_comes_back_lets_the_queue_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, {1: SILENCE_S + 1, 2: 0.0})
    assert world.ranks.suspect() and world.said == ["freeze"]
    time.sleep(0.4)
    assert world.said == ["freeze"], "it has not been silent for long enough"
    world.cluster.silent_s[1] = 0.0
    world.until(lambda: world.said == ["freeze", "thaw"])
    assert asked_to_end(world.store) == []


def test_a_rank_that_stays_silent_is_ended_by_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, {1: 0.0, 3: TIMEOUT_S - 1})
    assert world.ranks.suspect() and world.ranks.suspect()
    time.sleep(0.4)
    assert asked_to_end(world.store) == []
    world.cluster.silent_s[3] = TIMEOUT_S + 1
    world.until(lambda: asked_to_end(world.store) == [HungRank(3, 103, TIMEOUT_S)])
    assert "thaw" not in world.said, "the queue waits for the restart"
    world.until(lambda: "thaw" in world.said)
    time.sleep(0.3)
    assert world.said == ["freeze", "freeze", "thaw"], "one thread watches"


def test_a_rank_0_that_slept_itself_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hears the others again with its next heartbeat."""
    world = World(monkeypatch, {1: TIMEOUT_S + 1, 2: TIMEOUT_S + 1})
    assert world.ranks.suspect()
    world.cluster.silent_s = {1: 0.0, 2: 0.0}
    world.until(lambda: world.said == ["freeze", "thaw"])
    assert asked_to_end(world.store) == []
