"""Makes the helpers of tests/support and the rank pool importable by name (pytest's importlib mode adds no folder by itself), and chooses where Triton's
kernels run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
for folder in (HERE / "support", HERE / "parallel"):
    sys.path.append(str(folder))

# Before any test file imports a kernel. The pack itself never chooses the interpreter: its "auto" takes the eager path on a CPU.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def _checkpoint(tmp_path_factory: pytest.TempPathFactory, kind: str) -> Path:
    """Sizes divide by 8. Nobody changes it."""
    from dataclasses import replace

    from specs import EIGHT_WAYS

    from phase_parallel.models.hunyuan_image_3.synthetic import write_checkpoint

    folder = tmp_path_factory.mktemp("checkpoints") / kind
    write_checkpoint(folder, replace(EIGHT_WAYS, kind=kind))
    return folder


@pytest.fixture(scope="session")
def eight_ways(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small base checkpoint."""
    return _checkpoint(tmp_path_factory, "base")


@pytest.fixture(scope="session")
def instruct(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Instruct checkpoint: its weights write one fixed think and recaption text."""
    return _checkpoint(tmp_path_factory, "instruct")


@pytest.fixture(scope="session")
def distil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Distil checkpoint: guidance and the next timestep are embedded."""
    return _checkpoint(tmp_path_factory, "distil")


@pytest.fixture(scope="session")
def small_instruct(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Instruct checkpoint that greedily writes "quick.", "a dog!" and the ratio token of row 12; nobody changes it."""
    from phase_parallel.models.hunyuan_image_3.synthetic import SyntheticSpec, write_checkpoint

    folder = tmp_path_factory.mktemp("checkpoints") / "small-instruct"
    write_checkpoint(folder, SyntheticSpec(kind="instruct", latent_channels=4, vit_layers=1))
    return folder


@pytest.fixture(scope="session")
def small_distil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small distilled checkpoint; nobody changes it."""
    from phase_parallel.models.hunyuan_image_3.synthetic import SyntheticSpec, write_checkpoint

    folder = tmp_path_factory.mktemp("checkpoints") / "small-distil"
    write_checkpoint(folder, SyntheticSpec(kind="distil", latent_channels=4, vit_layers=1))
    return folder


@pytest.fixture(scope="session")
def random_mini(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mini Instruct checkpoint with random weights; nobody changes it."""
    from random_mini import write_random_mini

    return write_random_mini(tmp_path_factory.mktemp("mini") / "instruct", "instruct")


@pytest.fixture(scope="session")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both mini checkpoints, random, as the pack ships them: Distil without the shard that is also Instruct's. Nobody changes them."""
    from random_mini import write_random_mini

    from phase_parallel.train.mini import NAMES

    folder = tmp_path_factory.mktemp("shipped")
    for kind, name in NAMES.items():
        write_random_mini(folder / name, kind)
    max((folder / NAMES["distil"]).glob("*.safetensors")).unlink()
    return folder
