"""What the launcher exports is what a rank reads, and a wrong value is refused with its name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phase_parallel.parallel import environment as names
from phase_parallel.parallel.environment import EnvironmentProblem, LaunchEnvironment

LAUNCH = LaunchEnvironment(
    rank=2,
    world_size=4,
    local_rank=2,
    store_host="127.0.0.1",
    store_port=29400,
    secret="0123456789abcdef",
    launch_id="a1b2",
    ports=(8188, 8201, 8202, 8203),
    timeout_s=60.0,
    device="cuda",
    model_dirs=("/models", "/more models"),
    restart_count=1,
    plan="hybrid",
    machine_ranks=0,
)


def test_round_trip() -> None:
    assert LaunchEnvironment.from_environ(LAUNCH.to_environ()) == LAUNCH
    addresses = ("127.0.0.1", "10.0.0.1", "fd00::2", "fd00::2")
    shorter = replace(LAUNCH, timeout_s=2.5, device="cpu", model_dirs=(), store_host="::1", plan=None, machine_ranks=2, addresses=addresses)
    assert LaunchEnvironment.from_environ(shorter.to_environ()) == shorter


def test_without_our_launcher() -> None:
    assert LaunchEnvironment.from_environ({"RANK": "0", "WORLD_SIZE": "2"}) is None


def test_what_may_be_left_out() -> None:
    environ = LAUNCH.to_environ()
    for name in (
        names.TIMEOUT_S,
        names.DEVICE,
        names.MODEL_DIRS,
        names.LOCAL_RANK,
        names.RESTART_COUNT,
        names.PLAN,
        names.LOCAL_WORLD_SIZE,
    ):
        del environ[name]
    launch = LaunchEnvironment.from_environ(environ)
    assert launch == replace(LAUNCH, device="cpu", model_dirs=(), restart_count=0, plan=None)


def test_derived() -> None:
    assert LAUNCH.port == 8202
    assert LAUNCH.url(0) == "http://127.0.0.1:8188"
    elsewhere = replace(LAUNCH, addresses=("127.0.0.1", "10.0.0.1", "fd00::2", "fd00::2"))
    assert [elsewhere.url(rank) for rank in (0, 1, 2)] == ["http://127.0.0.1:8188", "http://10.0.0.1:8201", "http://[fd00::2]:8202"]
    assert LAUNCH.store_prefix != replace(LAUNCH, restart_count=2).store_prefix


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        (names.STORE, "29400", "is not host:port"),
        (names.STORE, "localhost:x", "is not host:port"),
        (names.SECRET, "", "PHASE_PARALLEL_SECRET is not set although PHASE_PARALLEL_STORE is"),
        (names.SECRET, "short", "has 5 characters; it needs 16 or more"),
        (names.LAUNCH_ID, "", "PHASE_PARALLEL_LAUNCH_ID is not set"),
        (names.RANK, "4", "RANK=4 is out of range; use a number from 0 to 3"),
        (names.RANK, "two", "RANK='two' is not a number"),
        (names.WORLD_SIZE, "0", "WORLD_SIZE=0 is out of range"),
        (names.PORTS, "8188,8201", "names 2 ports but WORLD_SIZE is 4"),
        (names.PORTS, "8188,a,b,c", "is not a comma-separated list of ports"),
        (names.ADDRESSES, "10.0.0.1,10.0.0.2", "names 2 addresses but WORLD_SIZE is 4"),
        (names.PORT, "8188", "gives rank 2 port 8202; the two must agree"),
        (names.TIMEOUT_S, "soon", "PHASE_PARALLEL_TIMEOUT_S='soon' is not a number"),
        (names.TIMEOUT_S, "0", "is out of range; use a number from 1 to 86400"),
        (names.TIMEOUT_S, "nan", "is out of range"),
        (names.PLAN, "fast", "PHASE_PARALLEL_PLAN='fast' cannot be used: unknown plan 'fast'; choose one of"),
        (names.PLAN, "single", "PHASE_PARALLEL_PLAN='single' cannot be used: plan single uses 1 rank but 4 are running"),
        (names.LOCAL_WORLD_SIZE, "5", "LOCAL_WORLD_SIZE=5 is out of range; use a number from 1 to 4"),
        (names.LOCAL_WORLD_SIZE, "2", "plan hybrid adds up the layers of prefill over ranks 0, 1, 2, 3, which are on 2 machines"),
        (names.DEVICE, "tpu", "PHASE_PARALLEL_DEVICE='tpu' is not a device kind; use cpu or cuda"),
    ],
)
def test_bad_value(name: str, value: str, sentence: str) -> None:
    with pytest.raises(EnvironmentProblem, match=sentence.replace("(", r"\(")):
        LaunchEnvironment.from_environ(LAUNCH.to_environ() | {name: value})
