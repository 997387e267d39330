"""A rank fails while text is written: the other one says so at once, and both write again. On two GPUs where there are two, else on the CPU."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_gpus import have_gpus, on_gpu
from rank_pool import RankPool

from phase_parallel.models.hunyuan_image_3.synthetic import SyntheticSpec, write_checkpoint

pytestmark = pytest.mark.ranks4
HERE = Path(__file__).parent
GPUS = have_gpus(2)
# Without the word that ends reductions the ranks would wait for their limit of two minutes.
SOON_S = 1.0 if GPUS else 3.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "checkpoint", SyntheticSpec(kind="instruct", dtype="bfloat16" if GPUS else "float32"))
    return tmp_path / "checkpoint"


@pytest.fixture
def ranks() -> Iterator[RankPool]:
    helpers = os.pathsep.join([str(HERE.parent / "parallel"), os.environ.get("PYTHONPATH", "")])

    def environment(rank: int, store: str) -> dict[str, str]:
        own = {"PYTHONPATH": helpers, "DEVICE": "cuda" if GPUS else "cpu"}
        return own | (on_gpu(rank) if GPUS else {"TRITON_INTERPRET": "0"})

    pool = RankPool(HERE / "fault_program.py", 2, environment)
    yield pool
    pool.close()


def test_failure_is_told_at_once_and_the_next_text_is_whole(folder: Path, ranks: RankPool) -> None:
    before = [reply.result for reply in ranks.run("text", folder=str(folder), timeout_s=200)]
    assert before[0]["tokens"] == before[1]["tokens"]
    if GPUS:
        assert before[0]["reduction"].startswith("peer memory")
    told = [reply.result for reply in ranks.run("text", folder=str(folder), failing=1, timeout_s=200)]
    assert told[0]["error"] == told[1]["error"]
    assert told[0]["error"].startswith("rank 1 failed in AR (") and told[0]["error"].endswith("): the disk is full")
    assert 0 <= told[0]["at"] - told[1]["at"] < SOON_S
    after = [reply.result for reply in ranks.run("text", folder=str(folder), timeout_s=200)]
    assert after == before


def test_a_killed_rank_is_told_at_once(folder: Path, ranks: RankPool) -> None:
    started = ranks.start("text", folder=str(folder), standing=1)
    assert ranks.collect([1], 200)[1].result == "standing"
    time.sleep(1.0)
    killed = time.monotonic()
    ranks.processes[1].kill()
    told = ranks.collect([started[0]], 60)[0].result
    assert told["error"].startswith("rank 1 failed in AR (") and told["error"].endswith("): the process has ended")
    assert told["at"] - killed < SOON_S
