"""The JSON store over a real TCPStore, in one process with several threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from phase_parallel.parallel.store import JsonStore, StoreTimeout, StoreUnreachable


@pytest.fixture(params=["tcp", "in process"])
def store(request: pytest.FixtureRequest) -> Iterator[JsonStore]:
    if request.param == "in process":
        yield JsonStore.in_process()
        return
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield JsonStore.tcp("127.0.0.1", server.port, "launch/0")
    del server


def test_values_come_back_as_json(store: JsonStore) -> None:
    value = {"text": "ü\n", "numbers": [1, 2.5, None], "deep": {"a": [True]}}
    store.set("a/b", value)
    assert store.find("a/b") == value
    assert store.find("a") is None
    store.delete("a/b")
    assert store.find("a/b") is None


def test_what_is_not_json_is_refused_where_it_is_set(store: JsonStore) -> None:
    with pytest.raises(TypeError):
        store.set("a", object())


def test_the_first_value_stands(store: JsonStore) -> None:
    assert store.set_first("fault", {"rank": 2}) == {"rank": 2}
    assert store.set_first("fault", {"rank": 1}) == {"rank": 2}


def test_collect_waits_for_all_keys_and_keeps_their_order(store: JsonStore) -> None:
    store.set("2", "two")
    timer = threading.Timer(0.1, store.set, ("1", "one"))
    timer.start()
    assert store.collect(["1", "2"], 5.0) == ["one", "two"]
    timer.join()


def test_timeout_names_what_is_missing(store: JsonStore) -> None:
    store.set("enter/0", 0)
    start = time.monotonic()
    with pytest.raises(StoreTimeout) as timeout:
        store.collect(["enter/0", "enter/1", "enter/2"], 0.2)
    assert timeout.value.missing == ("enter/1", "enter/2")
    assert time.monotonic() - start < 1.0


def test_what_comes_at_the_last_moment_is_not_missing(store: JsonStore) -> None:
    """The process slept past the limit, and the value came between its last look and the limit's."""

    def late() -> None:
        time.sleep(0.2)
        store.set("enter/0", "here")

    assert store.collect(["enter/0"], 0.1, late) == ["here"]


def test_check_ends_a_wait(store: JsonStore) -> None:
    looks = []

    def check() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise KeyError("enough")

    with pytest.raises(KeyError):
        store.wait("never", None, check)


def test_a_thread_that_waits_does_not_hold_up_the_others(store: JsonStore) -> None:
    """A connection each, and no clock: what counts is that the other thread gets through while this one still waits."""
    found, connections = [], []

    def wait() -> None:
        connections.append(store._store())
        found.append(store.wait("late", 60.0))

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.1)
    store.set("early", 1)
    assert store.find("early") == 1
    assert waiting.is_alive() and found == []
    store.set("late", 2)
    waiting.join()
    assert found == [2]
    assert connections[0] is not store._store()


def test_launches_do_not_see_each_other() -> None:
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    before = JsonStore.tcp("127.0.0.1", server.port, "launch/0")
    after = JsonStore.tcp("127.0.0.1", server.port, "launch/1")
    before.set("fault/1", "old")
    assert after.find("fault/1") is None


def test_nobody_listens() -> None:
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    port = server.port
    del server
    with pytest.raises(StoreUnreachable, match=f"at 127.0.0.1:{port} does not answer .* `phase-parallel up`"):
        JsonStore.tcp("127.0.0.1", port, "launch/0", timeout_s=2.0).find("a")
