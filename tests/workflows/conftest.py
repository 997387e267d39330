"""Makes the helpers here importable by name, and starts the one ComfyUI on four ranks that all files of this folder share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent))

from graph_runs import GOLDEN, OTHER_GOLDEN, User

from phase_parallel.launch.running import Launch
from phase_parallel.models.hunyuan_image_3.synthetic import SyntheticSpec, write_checkpoint


@pytest.fixture(scope="session")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An Instruct checkpoint whose weights can be seen in the memory of a process: 96 MB, half of them on each rank."""
    folder = tmp_path_factory.mktemp("checkpoints") / "heavy"
    write_checkpoint(folder, SyntheticSpec(kind="instruct", latent_channels=4, vit_layers=1, hidden=512, heads=8, head_dim=64, expert_width=256, layers=4))
    return folder


@pytest.fixture(scope="session")
def launch(small_instruct: Path, small_distil: Path, heavy: Path) -> Iterator[Launch]:
    """All small checkpoints under one launch: starting four ComfyUI processes takes longer than most graphs."""
    others = [OTHER_GOLDEN / "checkpoints" / name for name in ("tiny-instruct", "tiny-instruct-distil")]
    with Launch(
        ranks=4,
        models=[GOLDEN / "checkpoints", small_instruct, small_distil, heavy, *(folder for folder in others if folder.is_dir())],
        comfy_flags=["--preview-method", "latent2rgb"],
        # Without a fixed threshold glibc keeps what was freed, and nobody could see that it was.
        environment={"COMFYUI_DIR": os.environ.get("COMFYUI_DIR", ""), "MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
        timeout_s=900.0,
    ) as running:
        yield running


@pytest.fixture(scope="session")
def user(launch: Launch) -> User:
    return User(launch)


@pytest.fixture(scope="session")
def needs_flow(user: User) -> None:
    """Only a host with flow sampling can run the graphs with stock samplers."""
    if "ModelSamplingSD3" not in user.node_names:
        pytest.skip("this ComfyUI has no flow sampling; set COMFYUI_DIR to a newer one")
