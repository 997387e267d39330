"""Steps of a picture on two ranks that add up through each other's memory: replays are the steps themselves, both ranks make the same, and a peer that
fails inside a step is told within the limit. Skipped where there are no two GPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_gpus import have_gpus, on_gpu
from rank_pool import RankPool
from specs import PICTURES_ON_GPUS

from phase_parallel.models.hunyuan_image_3.synthetic import write_checkpoint
from phase_parallel.parallel.groups import gloo_limit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not have_gpus(2), reason="needs two CUDA devices")]
HERE = Path(__file__).parent
LIMIT_S = 8.0
STEPS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("gpu") / "checkpoint"
    write_checkpoint(path, PICTURES_ON_GPUS)
    return str(path)


def start(timeout_s: float) -> RankPool:
    helpers = os.pathsep.join([str(HERE.parent / "parallel"), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": helpers, "TIMEOUT_S": f"{timeout_s:g}", "DEVICE": "cuda"}
    return RankPool(HERE / "step_program.py", 2, lambda rank, store: own | on_gpu(rank))


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = start(120.0)
    yield pool
    pool.close()


@pytest.fixture
def short() -> Iterator[RankPool]:
    """Ranks of one test, one of which does not survive it."""
    pool = start(LIMIT_S)
    yield pool
    pool.close()


def run(pool: RankPool, scenario: str, **arguments: object) -> list[dict]:
    replies = pool.run(scenario, timeout_s=300, **arguments)
    assert not any(reply.error for reply in replies), replies
    return [reply.result for reply in replies]


@pytest.mark.parametrize("mode", ["batched", "serial"])
def test_replays_equal_launches_bit_by_bit_on_both_ranks(mode: str, folder: str, ranks: RankPool) -> None:
    first, second = run(ranks, "pictures", folder=folder, cfg_mode=mode, steps=STEPS)
    assert first["reason"] == second["reason"] == "peer memory: its sums passed the self-test on all ranks"
    assert first["records"] and first["by_group"]
    assert first["digests"]["launched"] == first["digests"]["recorded"]
    assert first == second
    print(f"distance to the process group's velocities ({mode}): {first['distance']:.2e}")
    assert first["distance"] < 2e-2


@pytest.mark.parametrize("graphs", [True, False], ids=["replayed", "launched"])
def test_step_does_not_synchronise_and_memory_is_flat(graphs: bool, folder: str, ranks: RankPool) -> None:
    assert [result["grown"] for result in run(ranks, "quiet", folder=folder, graphs=graphs)] == [[0, 0]] * 2


def test_failure_inside_a_replay_is_told_at_once_and_the_next_picture_is_whole(folder: str, ranks: RankPool) -> None:
    """Without the word that ends reductions the other rank would wait for its limit of two minutes."""
    before = run(ranks, "picture", folder=folder, steps=STEPS)
    assert before[0]["records"] and before[0] == before[1]
    for failing in (1, 0):
        told = run(ranks, "picture", folder=folder, steps=STEPS, failing=failing)
        assert told[0]["error"] == told[1]["error"] and "digest" not in told[0] | told[1]
        assert told[0]["error"].startswith(f"rank {failing} failed in denoise (") and told[0]["error"].endswith("): the disk is full")
        assert 0 <= told[1 - failing]["at"] - told[failing]["at"] < 3.0
        assert run(ranks, "picture", folder=folder, steps=STEPS) == before


def test_failure_in_front_of_a_recording_is_told_at_once(folder: str, ranks: RankPool) -> None:
    """The second step of rows is recorded, and the other rank replays it alone."""
    run(ranks, "picture", folder=folder, steps=1, failing=0, at=1)  # the next run begins with new groups, and so without records
    told = run(ranks, "picture", folder=folder, steps=STEPS, failing=1, at=2)
    assert told[0]["error"] == told[1]["error"] and told[0]["error"].endswith("): the disk is full")
    assert 0 <= told[0]["at"] - told[1]["at"] < 3.0


def test_a_rank_that_is_killed_inside_a_step_is_told_at_once(folder: str, short: RankPool) -> None:
    started = short.start("picture", folder=folder, steps=STEPS, standing=1)
    assert short.collect([1], 300)[1].result == "standing"
    time.sleep(1.0)
    killed = time.monotonic()
    short.processes[1].kill()
    told = short.collect([started[0]], 60)[0].result
    assert told["error"].startswith("rank 1 failed in denoise (") and told["error"].endswith("): the process has ended")
    assert told["at"] - killed < 5.0


def test_a_rank_that_stands_still_inside_a_step_is_told_within_the_limit(folder: str, short: RankPool) -> None:
    started = short.start("picture", folder=folder, steps=STEPS, standing=1)
    assert short.collect([1], 300)[1].result == "standing"
    stood = time.monotonic()
    told = short.collect([started[0]], 60)[0].result
    assert told["error"].startswith("rank 1 did not") and "digest" not in told, told
    # The groups end when gloo lets go of what it waits for.
    assert told["at"] - stood < gloo_limit(LIMIT_S).total_seconds() + 5.0
