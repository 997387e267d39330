"""Rank 0 drives three workers over HTTP and the store, as it does inside ComfyUI; only ComfyUI itself is a
stand-in.

Ranks cannot disagree about what is cached or in which order nodes run, because workers see announcements and
no graph: a prompt that calls nothing (all its nodes cached) opens no session at all.
"""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankPool, Reply

from phase_parallel.nodes.driver import Driver
from phase_parallel.nodes.fan_out import RankUnavailable
from phase_parallel.parallel.cluster import Cluster
from phase_parallel.parallel.environment import LaunchEnvironment
from phase_parallel.parallel.operations import register
from phase_parallel.parallel.store import StoreUnreachable

pytestmark = pytest.mark.ranks4
SECRET = "a secret of one launch"
TOTAL = {"total": [2, 4, 6]}


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="module")
def launch() -> Iterator[RankPool]:
    ports = tuple(free_ports(4))

    def environment(rank: int, store: str) -> dict[str, str]:
        host, port = store.split(":")
        return LaunchEnvironment(
            rank=rank,
            world_size=4,
            local_rank=rank,
            store_host=host,
            store_port=int(port),
            secret=SECRET,
            launch_id="test",
            ports=ports,
            timeout_s=4.0,
            device="cpu",
            model_dirs=(),
            restart_count=0,
        ).to_environ()

    pool = RankPool(Path(__file__).parent / "driver_program.py", 4, environment)
    pool.ports = ports
    # The first session makes the process groups, which may outlast the short time limit on a busy machine.
    for _ in range(4):
        if prompt(pool, {}).error_type == "":
            break
    yield pool
    pool.close()


def on_rank_0(launch: RankPool, scenario: str, **arguments: Any) -> Reply:
    return launch.collect(launch.start(scenario, ranks=[0], **arguments), 30.0)[0]


def prompt(launch: RankPool, *calls: dict[str, Any], **arguments: Any) -> Reply:
    return on_rank_0(launch, "prompt", prompt_id=str(uuid.uuid4()), calls=list(calls), **arguments)


def works(launch: RankPool) -> None:
    reply = prompt(launch, {})
    assert reply.error_type == "" and reply.result[0][1] == TOTAL


def histories(launch: RankPool) -> list[list[Any]]:
    return [reply.result for reply in launch.run("history")[1:]]


def test_one_prompt_is_one_session_of_several_sections(launch: RankPool) -> None:
    before = histories(launch)[0]
    reply = prompt(launch, {"name": "first"}, {"name": "second"}, {"name": "third"})
    assert reply.error == ""
    assert [result["name"] for result, _ in reply.result] == ["first", "second", "third"]
    assert [result["measured"] for result, _ in reply.result] == [{"rank": 0}] * 3
    assert all(tensors == TOTAL for _, tensors in reply.result)
    # Nobody said that the prompt is over but ComfyUI's queue; the followers have ended all the same.
    after = histories(launch)
    assert after[0] == after[1] == after[2]
    assert [sections for _, sections in after[0][len(before) :]] == [3]


def test_a_prompt_that_calls_nothing_reaches_no_worker(launch: RankPool) -> None:
    before = histories(launch)
    assert prompt(launch).error_type == ""
    assert histories(launch) == before


def test_two_prompts_in_a_row(launch: RankPool) -> None:
    works(launch)
    works(launch)


def test_the_next_prompt_ends_a_session_that_nobody_closed(launch: RankPool) -> None:
    assert prompt(launch, {}, keep_running=True).error_type == ""
    works(launch)


def test_a_call_between_prompts(launch: RankPool) -> None:
    """The user's "free memory" reaches the pack while no prompt runs."""
    reply = on_rank_0(launch, "prompt", prompt_id=None, calls=[{}])
    assert reply.error_type == "" and reply.result[0][1] == TOTAL
    works(launch)


@pytest.mark.parametrize("rank", [0, 2])
def test_an_exception_on_a_rank(launch: RankPool, rank: int) -> None:
    reply = prompt(launch, {"fails": rank})
    assert (reply.error_type, reply.error) == (
        "RankFault",
        f"rank {rank} failed in sum (step 1 of 2): the toy operation broke",
    )
    assert reply.seconds < 5.0
    works(launch)


def test_cancel(launch: RankPool) -> None:
    assert prompt(launch, {"steps": 50}, cancel_at=2).error_type == "Interrupted"
    works(launch)


def test_cancel_by_the_progress_hook(launch: RankPool) -> None:
    """ComfyUI's hook raises in the middle of a step and clears its flag; no rank may be left behind."""
    assert prompt(launch, {"steps": 50}, hook_raises_at=2).error_type == "Interrupted"
    works(launch)


def test_a_token_that_changes_on_its_way(launch: RankPool) -> None:
    launch.run("tamper", rank=1)
    reply = prompt(launch, {})
    launch.run("tamper", rank=None)
    assert (reply.error_type, reply.error) == (
        "SectionMismatch",
        "rank 1 has another input than rank 0 in sum",
    )
    works(launch)


def test_another_result_on_a_rank(launch: RankPool) -> None:
    reply = prompt(launch, {"odd_result": 3})
    assert reply.error_type == "SectionMismatch"
    assert reply.error == "rank 3 has another result than rank 0 in sum (step 2 of 2)"
    works(launch)


def test_an_operation_that_one_rank_does_not_know(launch: RankPool) -> None:
    reply = prompt(launch, {"op": "toy.missing"})
    assert reply.error_type == "RankFault"
    assert reply.error.startswith("rank 3 failed in missing: operation toy.missing is unknown")
    works(launch)


def test_a_worker_that_refuses(launch: RankPool) -> None:
    launch.run("behave", how="refuse", who=[2])
    reply = prompt(launch, {})
    launch.run("behave", how="follow", who=[])
    assert reply.error_type == "RankUnavailable"
    assert reply.error.startswith(
        f"rank 2 does not take part in this prompt: http://127.0.0.1:{launch.ports[2]}"
    )
    assert "answered 400 (the prompt is not valid)" in reply.error
    works(launch)


def test_a_worker_that_accepts_and_never_comes(launch: RankPool) -> None:
    launch.run("behave", how="accept only", who=[1, 3])
    reply = prompt(launch, {})
    cancelled = on_rank_0(launch, "cancel_while_joining", prompt_id=str(uuid.uuid4()))
    launch.run("behave", how="follow", who=[])
    assert reply.error_type == "RankUnavailable"
    assert reply.error.startswith("ranks 1 and 3 accepted this prompt but did not join it in 4 s")
    assert cancelled.error_type == "Interrupted" and cancelled.seconds < 2.0
    works(launch)


def test_a_worker_obeys_rank_0_only(launch: RankPool) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{launch.ports[2]}/prompt", b"{}")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=5)
    assert refused.value.code == 403
    message = json.loads(refused.value.read())["error"]["message"]
    assert message.startswith("this is rank 2 of a PhaseParallel launch")
    assert message.endswith(f"open rank 0 at http://127.0.0.1:{launch.ports[0]}")


def test_sessions_leave_nothing_in_the_store(launch: RankPool) -> None:
    """All that went before: refused, cancelled, failed and finished sessions."""
    works(launch)
    assert on_rank_0(launch, "left_keys").result == []


def test_a_worker_that_is_gone(launch: RankPool) -> None:
    """Last: rank 3 does not come back."""
    launch.processes[3].kill()
    launch.processes[3].wait()
    reply = prompt(launch, {})
    assert reply.error_type == "RankUnavailable"
    assert reply.error.startswith("rank 3 does not take part in this prompt: nothing listens on its port")
    assert [sections for _, sections in launch.collect(launch.start("history", ranks=[1]), 20.0)[1].result][
        -1
    ] == 0


class AloneHost:
    """A ComfyUI that our launcher did not start."""

    class Stop(Exception):
        pass

    interruption = Stop

    def __init__(self, cancelled: Callable[[], bool]):
        self.cancelled = cancelled
        self.cleared = 0

    def running_prompt(self) -> str | None:
        return "prompt"

    def clear_cancel(self) -> None:
        self.cleared += 1


@register("alone.double")
def double(context: Any, args: dict[str, Any], tensors: dict) -> tuple[dict[str, Any], dict]:
    context.section.check(0, 1)
    if args.get("fails"):
        raise KeyError("own")
    return {}, {"x": tensors["x"] * 2}


def test_world_of_one() -> None:
    asked = []
    host = AloneHost(lambda: bool(asked))
    driver = Driver(Cluster.alone(torch.device("cpu")), host, None)
    _, tensors = driver.call("alone.double", {}, {"x": torch.ones(2)}, node_id="1")
    assert tensors["x"].tolist() == [2.0, 2.0]
    with pytest.raises(KeyError):
        driver.call("alone.double", {"fails": True}, {"x": torch.ones(2)}, node_id="1")
    asked.append(True)
    with pytest.raises(AloneHost.Stop):
        driver.call("alone.double", {}, {"x": torch.ones(2)}, node_id="1")
    assert host.cleared == 1


@register("alone.lost")
def lost(context: Any, args: dict[str, Any], tensors: dict) -> tuple[dict[str, Any], dict]:
    raise RankUnavailable("rank 1 does not take part in this prompt")


@pytest.mark.parametrize("gone", [(), (1,)])
def test_the_cause_is_told_even_where_the_queue_cannot_be_kept(gone: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def rank_lost() -> None:
        asked.append("kept")
        raise StoreUnreachable("the launch's store does not answer")

    driver = Driver(Cluster.alone(torch.device("cpu")), AloneHost(lambda: False), None, rank_lost=rank_lost)
    monkeypatch.setattr(driver.cluster, "lost_ranks", lambda: gone)
    with pytest.raises(RankUnavailable):
        driver.call("alone.lost", {}, {}, node_id="1")
    assert len(asked) == len(gone)
