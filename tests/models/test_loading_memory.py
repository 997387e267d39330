"""What loading costs on the host, measured in a process of its own on a checkpoint that is large enough to tell."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from specs import EIGHT_WAYS

from phase_parallel.models.hunyuan_image_3 import synthetic
from phase_parallel.models.hunyuan_image_3.config import HunyuanImage3Config
from phase_parallel.models.hunyuan_image_3.loading import weight_bytes


@pytest.fixture(scope="module")
def two_gigabytes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("large") / "checkpoint"
    spec = replace(
        EIGHT_WAYS,
        hidden=1024,
        head_dim=64,
        kv_heads=8,
        experts=16,
        expert_width=3072,
        vocab=65536,
        patch_embed_width=256,
        max_shard_bytes=512 << 20,
    )
    block = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.02

    def repeated(key: str, shape: tuple[int, ...], **_: object) -> torch.Tensor:
        count = math.prod(shape)
        return block.repeat(-(-count // block.numel()))[:count].reshape(shape)

    with pytest.MonkeyPatch.context() as patch:
        # Half a billion normal numbers would take most of the test's time.
        patch.setattr(synthetic, "random_tensor", repeated)
        synthetic.write_checkpoint(folder, spec)
    assert sum(file.stat().st_size for file in folder.iterdir()) >= 2 * 10**9
    yield folder
    for file in folder.iterdir():
        file.unlink()


class TestMemory:
    """Peak host memory of a rank while it loads: its resident bytes plus at most 300 MB."""

    @pytest.mark.parametrize("weight_dtype", ["fp32", "bf16"])
    def test_peak_of_shard_0_of_2(self, two_gigabytes: Path, weight_dtype: str) -> None:
        program = Path(__file__).with_name("load_program.py")
        done = subprocess.run(
            [sys.executable, program, two_gigabytes, json.dumps(dict(name="hybrid", world_size=4)), weight_dtype],
            capture_output=True,
            text=True,
            timeout=200,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        used = json.loads(done.stdout)
        expected = sum(weight_bytes(HunyuanImage3Config.from_folder(two_gigabytes), weight_dtype))
        assert expected / 2 < used["resident"] < 0.6 * expected
        beside = used["peak"] - used["before"] - used["resident"]
        assert beside <= 300 * 10**6, f"{beside / 1e6:.0f} MB beside {used['resident'] / 1e6:.0f} MB of weights"
