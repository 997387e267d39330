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


@pytest.fixture(scope="session")
def launch(small_instruct: Path, small_distil: Path) -> Iterator[Launch]:
    """All small checkpoints under one launch: starting four ComfyUI processes takes longer than most graphs."""
    others = [OTHER_GOLDEN / "checkpoints" / name for name in ("tiny-instruct", "tiny-instruct-distil")]
    with Launch(
        ranks=4,
        models=[GOLDEN / "checkpoints", small_instruct, small_distil, *(folder for folder in others if folder.is_dir())],
        comfy_flags=["--preview-method", "latent2rgb"],
        environment={"COMFYUI_DIR": os.environ.get("COMFYUI_DIR", "")},
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
