"""The agent's own rules, without ranks: whom it ends at rank 0's request."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from phase_parallel.launch.agent import RanksAgent
from phase_parallel.parallel.hung_ranks import HungRank, ask_to_end
from phase_parallel.parallel.store import JsonStore


@pytest.fixture
def process() -> Iterator[subprocess.Popen]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield child
    child.kill()
    child.wait()


def agent_of(pids: list[int]) -> tuple[RanksAgent, JsonStore, list[str]]:
    agent, store, said = object.__new__(RanksAgent), JsonStore.in_process(), []
    agent._requests, agent._on_failure = store, said.append
    agent._pcontext = SimpleNamespace(pids=lambda: dict(enumerate(pids)))
    return agent, store, said


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Signals that would have been sent."""
    sent: list[tuple[int, int]] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda *call: sent.append(call))
        yield sent


def test_a_rank_that_hangs_is_ended_and_told_of_once(process: subprocess.Popen, ended: list) -> None:
    """A process that sits in a driver may need long to end."""
    agent, store, said = agent_of([process.pid])
    ask_to_end(store, [HungRank(0, process.pid, 60.0)])
    agent._end_hung_ranks()
    agent._end_hung_ranks()
    assert ended == [(process.pid, signal.SIGKILL)]
    assert said == [f"Rank 0 did not answer for 60 s: its process {process.pid} is ended."]


def test_a_request_does_not_reach_a_later_process_of_the_same_number(process: subprocess.Popen, ended: list) -> None:
    agent, store, _ = agent_of([])
    ask_to_end(store, [HungRank(0, process.pid, 60.0)])
    agent._end_hung_ranks()
    agent._pcontext = SimpleNamespace(pids=lambda: {0: process.pid})
    agent._end_hung_ranks()
    assert ended == []


def test_only_ranks_of_the_agent_are_ended(process: subprocess.Popen, ended: list) -> None:
    agent, store, said = agent_of([])
    ask_to_end(store, [HungRank(0, process.pid, 60.0), HungRank(1, os.getpid(), 60.0)])
    agent._end_hung_ranks()
    assert ended == [] and said == []
