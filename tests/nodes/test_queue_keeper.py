"""Rank 0's queue before and after a restart of all ranks, with the launch's real store between them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from phase_parallel.nodes.queue_keeper import LOST, QueueKeeper
from phase_parallel.parallel.environment import LaunchEnvironment


class Queue:
    def __init__(self) -> None:
        self.mutex = threading.RLock()
        self.queue: list[tuple] = []
        self.currently_running: dict[int, tuple] = {}
        self.history: dict[str, Any] = {}

    def put(self, item: tuple) -> None:
        self.queue.append(item)


@pytest.fixture
def environment() -> Iterator[LaunchEnvironment]:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield LaunchEnvironment(0, 2, 0, "127.0.0.1", store.port, "0123456789abcdef", "a1b2", (8188, 8189), 5.0, "cpu", (), 0)


def server() -> SimpleNamespace:
    return SimpleNamespace(prompt_queue=Queue(), number=0)


def item(number: int, name: str) -> tuple:
    return (number, name, {"1": {"class_type": "X", "inputs": {}}}, {"client_id": "c"}, ["1"], {"auth_token": "secret word"})


def test_waiting_prompts_come_back_in_their_order_and_the_running_one_is_shown_as_failed(environment: LaunchEnvironment) -> None:
    before, after = server(), server()
    before.prompt_queue.currently_running = {0: item(4, "running")}
    before.prompt_queue.queue = [item(6, "second"), item(5, "first")]
    QueueKeeper(before, environment)._copy()
    QueueKeeper(after, replace(environment, restart_count=1))._put_back()
    assert [entry[1] for entry in after.prompt_queue.queue] == ["first", "second"]
    assert after.prompt_queue.queue[0][:5] == item(5, "first")[:5] and after.prompt_queue.queue[0][5] == {}
    assert after.number == 7, "a new prompt comes behind them"
    failed = after.prompt_queue.history["running"]["status"]
    assert failed["status_str"] == "error" and failed["messages"][0][1]["exception_message"] == LOST
    json.dumps(after.prompt_queue.history)


def test_the_copy_follows_the_queue_and_holds_no_secret(environment: LaunchEnvironment) -> None:
    first = server()
    keeper = QueueKeeper(first, environment)
    first.prompt_queue.queue = [item(1, "a")]
    keeper._copy()
    assert "secret word" not in json.dumps(keeper._store.find("queue"))
    first.prompt_queue.queue = []
    keeper._copy()
    after = server()
    QueueKeeper(after, replace(environment, restart_count=1))._put_back()
    assert after.prompt_queue.queue == [] and after.prompt_queue.history == {}


def test_secrets_among_the_extra_data_are_not_copied(environment: LaunchEnvironment) -> None:
    """Where ComfyUI kept them before it made a field of them."""
    first = server()
    first.prompt_queue.queue = [(1, "a", {}, {"client_id": "c", "auth_token_comfy_org": "secret word", "api_key_comfy_org": "secret word"}, ["1"])]
    keeper = QueueKeeper(first, environment)
    keeper._copy()
    assert keeper._store.find("queue")["waiting"] == [[1, "a", {}, {"client_id": "c"}, ["1"]]]
    assert len(first.prompt_queue.queue[0][3]) == 3, "the prompt itself keeps them"


def test_what_was_put_back_is_put_back_once(environment: LaunchEnvironment) -> None:
    """Two restarts, with nothing queued between them."""
    lives = [server() for _ in range(3)]
    lives[0].prompt_queue.currently_running = {0: item(1, "running")}
    QueueKeeper(lives[0], environment)._copy()
    second = QueueKeeper(lives[1], replace(environment, restart_count=1))
    second._put_back()
    second._copy()
    QueueKeeper(lives[2], replace(environment, restart_count=2))._put_back()
    assert [list(life.prompt_queue.history) for life in lives] == [[], ["running"], []]


def test_a_prompt_that_comes_while_the_queue_is_frozen_is_not_lost(environment: LaunchEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    before = server()
    keeper = QueueKeeper(before, environment)
    before.prompt_queue.queue = [item(5, "first")]
    monkeypatch.setattr(keeper._store, "set", lambda key, value: before.prompt_queue.put(item(6, "late")))
    keeper.freeze()
    assert [entry[1] for entry in before.prompt_queue.queue] == ["late"], "it was not copied, so it must stay"


def test_nothing_starts_between_the_loss_of_a_rank_and_the_restart(environment: LaunchEnvironment) -> None:
    before, after = server(), server()
    keeper = QueueKeeper(before, environment)
    before.prompt_queue.queue = [item(5, "first")]
    keeper.freeze()
    assert before.prompt_queue.queue == []
    keeper._copy()
    QueueKeeper(after, replace(environment, restart_count=1))._put_back()
    assert [entry[1] for entry in after.prompt_queue.queue] == ["first"]


def test_nothing_was_ever_queued(environment: LaunchEnvironment) -> None:
    after = server()
    QueueKeeper(after, replace(environment, restart_count=1))._put_back()
    assert after.prompt_queue.queue == []
