"""The demo as a user runs it: a real ComfyUI, four ranks, one request, one picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from phase_parallel.launch.cli import main
from phase_parallel.launch.paths import runtime_folder


@pytest.mark.host
@pytest.mark.ranks4
@pytest.mark.timeout(900)
def test_demo_makes_a_picture_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "cpu", "--output", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    (picture,) = (tmp_path / "out").glob("*.png")
    with Image.open(picture) as image:
        assert image.width % 16 == 0 and image.height % 16 == 0
        graph = json.loads(image.info["prompt"])
    assert "HunyuanImage3Generate" in {node["class_type"] for node in graph.values()}
    for phase in ("load", "AR", "denoise", "VAE decode"):
        assert any(line.split()[: len(phase.split())] == phase.split() for line in shown.splitlines()), shown
    assert "50/50 steps" in shown
    digests = {
        line.split()[1] for line in shown.splitlines() if line.split()[:1] in (["0"], ["1"], ["2"], ["3"])
    }
    assert len(digests) == 1
    assert list(runtime_folder().iterdir()) == []
