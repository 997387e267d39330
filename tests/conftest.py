"""Makes the helpers of tests/support and the rank pool importable by name; pytest's importlib mode adds no folder by itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
for folder in (HERE / "support", HERE / "parallel"):
    sys.path.append(str(folder))


@pytest.fixture(scope="session")
def eight_ways(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small base checkpoint whose sizes divide by 8; nobody changes it."""
    from specs import EIGHT_WAYS

    from phase_parallel.models.hunyuan_image_3.synthetic import write_checkpoint

    folder = tmp_path_factory.mktemp("checkpoints") / "eight-ways"
    write_checkpoint(folder, EIGHT_WAYS)
    return folder
