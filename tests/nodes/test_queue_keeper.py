"""Rank 0's queue before and after a restart of all ranks, with the launch's real store between them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
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

    def wipe_queue(self) -> None:
        self.queue = []

    def delete_queue_item(self, wanted: Callable[[tuple], bool]) -> bool:
        found = [item for item in self.queue if wanted(item)]
        self.queue = [item for item in self.queue if item not in found]
        return bool(found)


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
    QueueKeeper(before, environment)._look()
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
    keeper._look()
    assert "secret word" not in json.dumps(keeper._store.find("queue"))
    first.prompt_queue.queue = []
    keeper._look()
    after = server()
    QueueKeeper(after, replace(environment, restart_count=1))._put_back()
    assert after.prompt_queue.queue == [] and after.prompt_queue.history == {}


def test_secrets_among_the_extra_data_are_not_copied(environment: LaunchEnvironment) -> None:
    """Where ComfyUI kept them before it made a field of them."""
    first = server()
    first.prompt_queue.queue = [(1, "a", {}, {"client_id": "c", "auth_token_comfy_org": "secret word", "api_key_comfy_org": "secret word"}, ["1"])]
    keeper = QueueKeeper(first, environment)
    keeper._look()
    assert keeper._store.find("queue")["waiting"] == [[1, "a", {}, {"client_id": "c"}, ["1"]]]
    assert len(first.prompt_queue.queue[0][3]) == 3, "the prompt itself keeps them"


def test_what_was_put_back_is_put_back_once(environment: LaunchEnvironment) -> None:
    """Two restarts, with nothing queued between them."""
    lives = [server() for _ in range(3)]
    lives[0].prompt_queue.currently_running = {0: item(1, "running")}
    QueueKeeper(lives[0], environment)._look()
    second = QueueKeeper(lives[1], replace(environment, restart_count=1))
    second._put_back()
    second._look()
    QueueKeeper(lives[2], replace(environment, restart_count=2))._put_back()
    assert [list(life.prompt_queue.history) for life in lives] == [[], ["running"], []]


class TestFrozen:
    """Between the loss of a rank and the restart."""

    @pytest.fixture
    def before(self) -> SimpleNamespace:
        return server()

    @pytest.fixture
    def keeper(self, before: SimpleNamespace, environment: LaunchEnvironment) -> QueueKeeper:
        return QueueKeeper(before, environment)

    def after(self, environment: LaunchEnvironment) -> tuple[list[str], list[str]]:
        """Ids that wait, and those shown as failed, when the ranks are there again."""
        life = server()
        QueueKeeper(life, replace(environment, restart_count=1))._put_back()
        return [entry[1] for entry in life.prompt_queue.queue], list(life.prompt_queue.history)

    def test_nothing_starts(self, before: SimpleNamespace, keeper: QueueKeeper, environment: LaunchEnvironment) -> None:
        before.prompt_queue.queue = [item(5, "first")]
        keeper.freeze()
        assert before.prompt_queue.queue == []
        keeper._look()
        assert self.after(environment) == (["first"], [])

    def test_an_idle_executor_gets_nothing_either(self, before: SimpleNamespace, keeper: QueueKeeper, environment: LaunchEnvironment) -> None:
        """It takes a prompt as soon as it is there, and does not wait for the keeper's next look."""
        queue = before.prompt_queue
        keeper.freeze()
        queue.put(item(5, "late"))
        assert queue.queue == []
        keeper._look()
        assert self.after(environment) == (["late"], [])
        keeper.thaw()
        queue.put(item(6, "later"))
        assert [entry[1] for entry in queue.queue] == ["late", "later"]

    def test_what_comes_late_waits_behind_the_others(self, before: SimpleNamespace, keeper: QueueKeeper, environment: LaunchEnvironment) -> None:
        before.prompt_queue.queue = [item(5, "first")]
        keeper.freeze()
        for late in (item(7, "third"), item(6, "second")):
            before.prompt_queue.put(late)
            keeper._look()
            assert before.prompt_queue.queue == []
        before.prompt_queue.put(item(-8, "at the front"))
        keeper._look()
        keeper._look()
        assert self.after(environment) == (["at the front", "first", "second", "third"], [])

    def test_what_comes_during_the_copy_stays_for_the_next_look(
        self, before: SimpleNamespace, keeper: QueueKeeper, environment: LaunchEnvironment, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before.prompt_queue.queue = [item(5, "first")]
        copy = keeper._store.set

        def interrupted(key: str, value: Any) -> None:
            copy(key, value)
            before.prompt_queue.put(item(6, "late"))

        monkeypatch.setattr(keeper._store, "set", interrupted)
        keeper.freeze()
        assert self.after(environment) == (["first"], [])
        monkeypatch.setattr(keeper._store, "set", copy)
        keeper._look()
        assert self.after(environment) == (["first", "late"], [])

    def test_what_the_executor_took_is_shown_as_failed(self, before: SimpleNamespace, keeper: QueueKeeper, environment: LaunchEnvironment) -> None:
        """The prompt that the lost rank broke ends meanwhile; what is known of it would end with this process."""
        queue = before.prompt_queue
        queue.currently_running = {3: item(4, "broken")}
        keeper.freeze()
        queue.currently_running = {4: item(5, "cut off")}
        queue.history = {"broken": {"status": {"status_str": "error"}}}
        keeper._look()
        queue.currently_running = {}
        keeper._look()
        assert self.after(environment) == ([], ["broken", "cut off"])

    def test_what_was_done_in_time_is_not_shown_as_failed(self, before: SimpleNamespace, keeper: QueueKeeper, environment: LaunchEnvironment) -> None:
        queue = before.prompt_queue
        queue.currently_running = {3: item(4, "done")}
        keeper.freeze()
        queue.currently_running, queue.history = {}, {"done": {"status": {"status_str": "success"}}}
        keeper._look()
        assert self.after(environment) == ([], [])

    def test_the_same_prompt_twice_is_two_prompts(self, before: SimpleNamespace, keeper: QueueKeeper, environment: LaunchEnvironment) -> None:
        """One runs, and one with the same id waits: who posts a prompt may choose its id."""
        before.prompt_queue.currently_running = {0: item(4, "twin")}
        before.prompt_queue.queue = [item(5, "twin")]
        keeper.freeze()
        keeper._look()
        assert self.after(environment) == (["twin"], ["twin"])

    def test_a_queue_that_thaws_goes_on_as_it_was(self, before: SimpleNamespace, keeper: QueueKeeper, environment: LaunchEnvironment) -> None:
        """The rank that was thought to be lost answers."""
        waiting = [item(5, "first"), item(6, "second")]
        before.prompt_queue.queue = list(waiting)
        before.prompt_queue.currently_running = {3: item(4, "broken")}
        keeper.freeze()
        before.prompt_queue.currently_running = {}
        keeper.thaw()
        keeper.thaw()
        assert before.prompt_queue.queue == waiting, "with their secrets, once"
        keeper._look()
        assert self.after(environment) == (["first", "second"], [])

    def test_the_thread_goes_on_looking(self, before: SimpleNamespace, keeper: QueueKeeper, environment: LaunchEnvironment) -> None:
        keeper.start()
        keeper.freeze()
        before.prompt_queue.put(item(5, "late"))
        wait_until(lambda: self.after(environment) == (["late"], []))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_a_look_that_fails_is_told_once_and_does_not_end_the_keeper(environment: LaunchEnvironment, caplog: pytest.LogCaptureFixture) -> None:
    before = server()
    keeper = QueueKeeper(before, environment)
    before.prompt_queue.queue = [(5, "odd")]
    keeper.start()
    wait_until(lambda: bool(caplog.messages))
    time.sleep(0.3)
    assert caplog.messages == ["the queue could not be copied for a restart, and is looked at again: IndexError: list index out of range"]
    before.prompt_queue.queue = [item(6, "right")]
    wait_until(lambda: bool(keeper._store.find("queue")))
    assert [entry[1] for entry in keeper._store.find("queue")["waiting"]] == ["right"]


def test_a_prompt_that_cannot_be_put_back_does_not_hold_back_the_others(
    environment: LaunchEnvironment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before, after = server(), server()
    before.prompt_queue.queue = [item(5, "first"), item(6, "second")]
    QueueKeeper(before, environment)._look()
    put = after.prompt_queue.put

    def choosy(entry: tuple) -> None:
        if entry[1] == "first":
            raise KeyError("its class is gone")
        put(entry)

    monkeypatch.setattr(after.prompt_queue, "put", choosy)
    QueueKeeper(after, replace(environment, restart_count=1))._put_back()
    assert [entry[1] for entry in after.prompt_queue.queue] == ["second"]
    assert caplog.messages[0] == "prompt first waited and could not be put back, queue it again: KeyError: 'its class is gone'"


def test_a_keeper_whose_launcher_has_gone_says_so_and_ends(
    environment: LaunchEnvironment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = QueueKeeper(server(), environment)

    def gone(key: str, value: Any) -> None:
        raise dist.DistNetworkError("the connection was closed")

    monkeypatch.setattr(keeper._store, "set", gone)
    keeper._keep()
    assert caplog.messages == ["the queue is no longer kept: the connection was closed"]


def test_nothing_was_ever_queued(environment: LaunchEnvironment) -> None:
    after = server()
    QueueKeeper(after, replace(environment, restart_count=1))._put_back()
    assert after.prompt_queue.queue == []


def test_clear_and_delete_reach_what_is_held(environment: LaunchEnvironment) -> None:
    one = server()
    queue = one.prompt_queue
    queue.queue = [item(1, "waits"), item(2, "unwanted"), item(3, "too")]
    keeper = QueueKeeper(one, environment)
    keeper.freeze()
    assert queue.delete_queue_item(lambda held: held[1] == "unwanted") and not queue.delete_queue_item(lambda held: held[1] == "unwanted")
    keeper.thaw()
    assert [waiting[1] for waiting in queue.queue] == ["waits", "too"]
    keeper.freeze()
    queue.wipe_queue()
    keeper.thaw()
    assert queue.queue == []
    queue.put(item(4, "later"))
    assert queue.delete_queue_item(lambda waiting: waiting[1] == "later") and queue.queue == []
