"""Mini checkpoints with random weights, written once; nobody changes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from random_mini import write_random_mini

from phase_parallel.train.mini import NAMES


@pytest.fixture(scope="session")
def random_mini(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An Instruct one."""
    return write_random_mini(tmp_path_factory.mktemp("mini") / "instruct", "instruct")


@pytest.fixture(scope="session")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both as the pack ships them: Distil without the shard that is also Instruct's."""
    folder = tmp_path_factory.mktemp("shipped")
    for kind, name in NAMES.items():
        write_random_mini(folder / name, kind)
    last = sorted((folder / NAMES["distil"]).glob("*.safetensors"))[-1]
    last.unlink()
    return folder
