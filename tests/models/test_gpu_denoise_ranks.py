"""Two hundred denoise steps on two GPUs, with the collectives of a real plan: no step waits for the device, memory stays flat, and both ranks make the
same latent bit by bit. Skipped where there are no two GPUs; ``PHASE_PARALLEL_SHARE_GPU`` puts both ranks on one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_gpus import have_gpus, on_gpu
from rank_pool import RankPool
from specs import PICTURES_ON_GPUS

from phase_parallel.models.hunyuan_image_3.denoise import CFG_MODES, CfgMode
from phase_parallel.models.hunyuan_image_3.synthetic import write_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not have_gpus(2), reason="needs two CUDA devices")]
HERE = Path(__file__).parent
STEPS, EARLY, MIDDLE = 200, 10, 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpu") / "checkpoint"
    write_checkpoint(path, PICTURES_ON_GPUS)
    return path


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    helpers = os.pathsep.join([str(HERE.parent / "parallel"), os.environ.get("PYTHONPATH", "")])
    pool = RankPool(HERE / "gpu_denoise_program.py", 2, lambda rank, store: {"PYTHONPATH": helpers, "DEVICE": "cuda", **on_gpu(rank)})
    yield pool
    pool.close()


@pytest.mark.parametrize("mode", CFG_MODES)
def test_two_hundred_steps_on_two_ranks(folder: Path, ranks: RankPool, mode: CfgMode) -> None:
    looks = [EARLY, MIDDLE, STEPS]
    replies = ranks.run("denoise", folder=str(folder), plan={"name": "tp"}, mode=mode, steps=STEPS, looks=looks, timeout_s=500)
    assert [reply.error for reply in replies] == ["", ""]
    found = [reply.result for reply in replies]
    assert all(one["finite"] for one in found)
    assert found[0]["digest"] == found[1]["digest"]
    for rank, one in enumerate(found):
        early, middle, last = (one["memory"][str(look)] for look in looks)
        print(f"rank {rank}, {mode}: allocated and reserved after {EARLY} steps {early}, {MIDDLE} {middle}, {STEPS} {last}, recorded {one['recorded']}")
        assert early[0] == last[0], "allocated"
        assert middle[1] == last[1], "reserved"
