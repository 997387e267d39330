"""The side channel by itself: faults, generations, heartbeats. Ranks are Cluster objects of one process,
without groups.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from phase_parallel.parallel.cluster import Cluster
from phase_parallel.parallel.collectives import Communicator
from phase_parallel.parallel.diagnosis import share_fault
from phase_parallel.parallel.faults import Fault, RankFault, SectionTimeout, describe_cause
from phase_parallel.parallel.groups import ProcessGroups
from phase_parallel.parallel.heartbeat import ended_ranks
from phase_parallel.parallel.plan import make_plan
from phase_parallel.parallel.process_cluster import process_cluster
from phase_parallel.parallel.rank_record import RankRecord, RecordKeeper
from phase_parallel.parallel.store import JsonStore, StoreUnreachable
from phase_parallel.parallel.waiting import CollectiveTimeout


@pytest.fixture
def pair() -> Iterator[tuple[Cluster, Cluster]]:
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    clusters = tuple(
        Cluster(
            JsonStore.tcp("127.0.0.1", server.port, "test"),
            rank=rank,
            world_size=2,
            device=torch.device("cpu"),
            timeout_s=5.0,
        )
        for rank in range(2)
    )
    yield clusters
    for cluster in clusters:
        cluster.close()


def wait_until(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def open_generation(*clusters: Cluster) -> None:
    generation = clusters[0].lead_generation(clusters[0].plan)
    for cluster in clusters[1:]:
        cluster.adopt_generation(generation, cluster.plan)


def connected(cluster: Cluster) -> Communicator:
    """A communicator without groups, made as ComfyUI makes it: in a node, where torch is in inference mode."""
    with torch.inference_mode():
        cluster.communicator = Communicator(cluster.plan, ProcessGroups(cluster.plan, {}, None, "gloo"))
    return cluster.communicator


def test_a_fault_ends_what_waits_on_the_devices(pair: tuple[Cluster, Cluster]) -> None:
    """On the rank that fails at once, on the others when they hear of it, whatever their main threads wait for."""
    zero, one = pair
    zero.start()
    open_generation(zero, one)
    waiting, failing = connected(zero).abort_word.tensor, connected(one).abort_word.tensor
    time.sleep(0.5)
    assert int(waiting) == int(failing) == 0
    one.fail(one.fault("failed", (1,), "the disk is full"))
    assert int(failing) == 1
    wait_until(lambda: int(waiting) == 1, limit_s=1.0)


def test_a_killed_process_is_missed_within_half_a_second(pair: tuple[Cluster, Cluster]) -> None:
    zero, _ = pair
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    zero.store.set("record/1", {"rank": 1, "host": socket.gethostname(), "pid": other.pid})
    zero.start()
    zero.adopt_generation(zero.lead_generation(zero.plan), zero.plan)
    waiting = connected(zero).abort_word.tensor
    time.sleep(0.5)
    assert int(waiting) == 0
    other.kill()
    other.wait()
    wait_until(lambda: int(waiting) == 1, limit_s=0.6)
    with pytest.raises(RankFault, match=r"^rank 1 failed while idle: the process has ended$"):
        zero.fault_check()


def test_a_main_thread_that_does_not_leave_after_a_fault_is_freed(pair: tuple[Cluster, Cluster], monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for its device, deaf to faults, and the device in a collective for the rank that failed."""
    zero, one = pair
    zero.start()
    open_generation(zero, one)
    communicator, ended = connected(zero), threading.Event()
    monkeypatch.setattr(communicator.groups, "end_kernels", ended.set)
    one.fail(one.fault("failed", (1,), "the disk is full"))
    assert not ended.wait(0.8), "it has a second to leave by itself"
    assert ended.wait(2.0)
    with pytest.raises(RankFault, match="the disk is full"):
        zero.fault_check()


def test_a_device_that_waits_too_long_is_freed_and_told(pair: tuple[Cluster, Cluster], monkeypatch: pytest.MonkeyPatch) -> None:
    zero, one = pair
    zero.start()
    open_generation(zero, one)
    communicator, ended = connected(zero), threading.Event()
    monkeypatch.setattr(communicator.groups, "end_kernels", ended.set)
    monkeypatch.setattr(communicator.groups, "backend", "nccl")
    zero.fault_check()
    limits = []
    monkeypatch.setattr(communicator._device, "overdue", lambda limit_s: limits.append(limit_s) or True)
    assert ended.wait(2.0)
    assert limits[0] > zero.timeout_s, "the main thread's own limit comes first"
    with pytest.raises(CollectiveTimeout, match="the device waited for a peer for 5 s"):
        zero.fault_check()
    # Whatever the main thread meets then is a consequence.
    error = share_fault(zero, ValueError("NaN"))
    assert isinstance(error, SectionTimeout) and "did not answer within 5 s" in str(error)


def test_a_published_fault_reaches_the_other_rank_by_itself(pair: tuple[Cluster, Cluster]) -> None:
    zero, one = pair
    zero.start()
    one.start()
    open_generation(zero, one)
    one.record.start_section("denoise")
    one.record.progress(2, 50)
    error = one.fail(one.fault("failed", (1,), "the disk is full"))
    assert isinstance(error, RankFault)
    deadline = time.monotonic() + 3.0
    with pytest.raises(RankFault) as fault:
        while time.monotonic() < deadline:
            zero.fault_check()
            time.sleep(0.02)
    assert str(fault.value) == str(error) == "rank 1 failed in denoise (step 3 of 50): the disk is full"


def test_the_first_fault_wins_and_the_next_generation_is_clean(pair: tuple[Cluster, Cluster]) -> None:
    zero, one = pair
    open_generation(zero, one)
    first = one.fail(one.fault("failed", (1,), "cause"))
    second = zero.fail(zero.fault("failed", (0,), "consequence"))
    assert str(first) == str(second)
    for cluster in pair:
        cluster.look_for_fault()  # told once; nothing is left to tell
    before = zero.generation
    open_generation(zero, one)
    assert zero.generation == one.generation == before + 1
    for cluster in pair:
        cluster.look_for_fault()


def test_a_fault_between_sections_is_told_at_the_next_one(pair: tuple[Cluster, Cluster]) -> None:
    zero, one = pair
    open_generation(zero, one)
    one.fail(one.fault("failed", (1,), "left"))
    with pytest.raises(RankFault):
        zero.lead_generation(zero.plan)
    assert zero.lead_generation(zero.plan) == one.generation + 1


def test_a_generation_lasts_while_nothing_changes(pair: tuple[Cluster, Cluster]) -> None:
    zero, _ = pair
    first = zero.lead_generation(zero.plan)
    assert zero.lead_generation(zero.plan) == first
    other = make_plan("tp", world_size=4)
    assert zero.lead_generation(other) == first + 1


def test_a_monitor_that_is_held_up_takes_nobody_for_silent(pair: tuple[Cluster, Cluster], monkeypatch: pytest.MonkeyPatch) -> None:
    """To end the kernels of a broken device can take long, and meanwhile nobody listens."""
    zero, one = pair
    zero.start()
    one.start()
    wait_until(lambda: zero.busy_ranks() == (1,))
    entered = threading.Event()
    monkeypatch.setattr(zero, "_free_device", lambda: (entered.set(), time.sleep(3.0)))
    assert entered.wait(2.0)
    time.sleep(2.8)
    assert zero.stale_ranks(2.5) == ()


def test_heartbeats_tell_who_is_silent_and_who_works(pair: tuple[Cluster, Cluster]) -> None:
    zero, one = pair
    assert zero.stale_ranks(0.0) == (1,)
    zero.start()
    one.start()
    wait_until(lambda: zero.stale_ranks(0.5) == () and zero.busy_ranks() == (1,))
    one.close()
    wait_until(lambda: zero.stale_ranks(1.5) == (1,))


def test_records_of_all_ranks(pair: tuple[Cluster, Cluster]) -> None:
    zero, one = pair
    assert zero.records() == [None, None]
    one.start()
    absent, record = zero.records()
    assert absent is None
    assert (record["rank"], record["pid"], record["phase"]) == (1, os.getpid(), "idle")
    assert zero.lost_ranks() == ()


def test_a_rank_whose_process_has_ended() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here = socket.gethostname()
    records = [
        {"rank": 1, "host": here, "pid": os.getpid()},
        {"rank": 2, "host": here, "pid": gone.pid},
        {"rank": 3, "host": "elsewhere", "pid": gone.pid},
    ]
    assert ended_ranks(records) == (2,)


def test_the_launcher_is_gone() -> None:
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    store = JsonStore.tcp("127.0.0.1", server.port, "test", timeout_s=2.0)
    cluster = Cluster(store, rank=0, world_size=2, device=torch.device("cpu"))
    cluster.start()
    del server

    def noticed() -> bool:
        try:
            cluster.store_check()
        except StoreUnreachable as error:
            return "the launcher has ended" in str(error)
        return False

    wait_until(noticed)
    cluster.close()


def test_process_cluster_without_a_launcher_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PHASE_PARALLEL_STORE", raising=False)
    cluster = process_cluster(torch.device("cpu"))
    assert cluster.world_size == 1 and process_cluster(torch.device("cpu")) is cluster
    assert cluster.plan.name == "single"


def test_record_keeps_phases_and_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    keeper = RecordKeeper(RankRecord(0, 1, "here", "", "cpu"))
    keeper.start_section("generate")
    now[0] += 1
    keeper.start_phase("decode", "token")
    now[0] += 2
    keeper.progress(8, 100)
    assert keeper.where() == ("decode", "token 9 of 100")
    keeper.start_phase("denoise", "step")
    assert keeper.where() == ("denoise", "")
    now[0] += 4
    keeper.progress(2, 2)
    assert keeper.where() == ("denoise", "step 2 of 2")
    assert keeper.end_section(digest="d") == {"generate": 1.0, "decode": 2.0, "denoise": 4.0}
    record = keeper.to_json()
    assert (record["tokens_per_s"], record["s_per_step"], record["digest"]) == (4.0, 2.0, "d")
    keeper.start_section("load")
    keeper.end_section(error="broke")
    assert keeper.to_json()["error"] == "broke"
    assert keeper.to_json()["digest"] == "d"
    assert keeper.to_json()["tokens_per_s"] == 4.0, "the last text's rate outlives later sections"


def test_record_keeps_the_last_error_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    keeper = RecordKeeper(RankRecord(0, 1, "here", "", "cpu"))
    keeper.start_section("load")
    keeper.end_section(error="broke")
    monkeypatch.setattr(time, "time", lambda: 2000.0)
    keeper.start_section("load")
    keeper.end_section(digest="d")
    record = keeper.to_json()
    assert (record["error"], record["error_at"]) == ("broke", 1000.0)


def test_loading_is_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    keeper = RecordKeeper(RankRecord(0, 1, "here", "", "cpu"))
    keeper.start_phase("load", "value")
    now[0] += 5
    keeper.progress(10, 50)
    record = keeper.to_json()
    assert (record["done"], record["total"], record["s_per_step"], record["tokens_per_s"]) == (10, 50, None, None)


def test_sections_that_are_steps_of_one_picture_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    keeper = RecordKeeper(RankRecord(0, 1, "here", "", "cpu"))

    def step(seconds: float, run: str, **end: str) -> tuple[int, float]:
        keeper.start_section("denoise", run)
        keeper.start_phase("denoise", "call")
        keeper.progress(3, 10)
        assert keeper.where() == ("denoise", "step 4 of 10")
        now[0] += seconds
        keeper.end_section(**(end or {"digest": "d"}))
        now[0] += 100  # the sampler's own business
        record = keeper.to_json()
        return record["steps"], record["s_per_step"]

    assert step(2, "prompt/3") == (1, 2.0)
    assert step(4, "prompt/3") == (2, 3.0)
    assert step(50, "prompt/3", error="broke") == (2, 3.0), "a step that failed has no speed"
    assert step(8, "other/3") == (1, 8.0)


def test_record_says_how_fast_a_text_was_without_its_prompt() -> None:
    keeper = RecordKeeper(RankRecord(0, 1, "here", "", "cpu"))
    keeper.note_text("one CUDA graph a token; peer memory", tokens=101, seconds=0.5)
    record = keeper.to_json()
    assert (record["tokens"], record["tokens_per_s"], record["text_path"]) == (101, 200.0, "one CUDA graph a token; peer memory")
    keeper.note_text("eager", tokens=1, seconds=0.1)
    assert keeper.to_json()["tokens_per_s"] is None


def test_record_names_the_groups_of_each_phase() -> None:
    keeper = RecordKeeper(RankRecord(0, 1, "here", "", "cpu"))
    keeper.take_place(make_plan("hybrid", world_size=4, rank=3), 1)
    record = keeper.to_json()
    assert record["place"] == {"shard": 1, "replica": 1, "logical_tp_rank": 3}
    assert record["groups"] == {"AR": {"TP": [3, 4]}, "denoise": {"TP": [1, 2], "SP": [1, 2]}}
    assert record["device_name"] == "CPU"
    memory = record["memory"]
    assert 0 < memory["resident_set"] <= memory["resident_peak"] < memory["host_total"]


def test_sentences() -> None:
    assert str(Fault("timeout", (1, 3), "denoise", "step 3 of 50", "60 s").error()) == (
        "ranks 1 and 3 did not answer within 60 s in denoise (step 3 of 50); see the log of that rank"
    )
    nobody = Fault("timeout", (), "load", "", "60 s")
    assert isinstance(nobody.error(), SectionTimeout)
    assert nobody.sentence().startswith("one of the other ranks did not answer within 60 s in load;")
    assert Fault.from_json(nobody.to_json()) == nobody
    assert describe_cause(ValueError("line one.\nline two")) == "line one"
    assert describe_cause(KeyError("x")) == "KeyError: 'x'"
    assert describe_cause(ZeroDivisionError()) == "ZeroDivisionError"
    assert describe_cause(torch.OutOfMemoryError("tried to allocate")) == "out of memory (tried to allocate)"
    cuda = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.50 GiB is free. Process 9 has 4.53 GiB in use."
    want = "out of memory (CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.50 GiB is free)"
    assert describe_cause(torch.OutOfMemoryError(cuda)) == want
