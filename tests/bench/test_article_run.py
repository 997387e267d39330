"""One part of ``bench article`` for real, on two CPU ranks."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from phase_parallel.launch.cli import main


def test_a_rehearsal_of_one_part(tmp_path: Path) -> None:
    out = tmp_path / "article"
    words = ["bench", "article", "--device", "cpu", "--scale", "small", "--ranks", "2", "--out", str(out)]
    assert main([*words, "--part", "load", "--part", "published"]) == 0
    result = json.loads((out / "load.json").read_text())
    assert {"hardware", "torch", "commit", "date", "nccl", "triton", "python"} <= set(result)
    assert result["article"]["command"].startswith("phase-parallel bench load --scheme tp --ranks 2")
    assert [load["files"] for load in result["loads"]] == ["cold", "warm"]
    for load in result["loads"]:
        assert load["seconds"] > 0 and len(load["host_peak_of_ranks"]) == 2 and load["bytes"] > 0
    assert result["disk"]["bytes"] == result["writing"]["bytes"] > result["checkpoint_bytes"] * 0.99
    assert not (Path(tempfile.gettempdir()) / f"phase-parallel-load-{os.getuid()}").exists(), "the checkpoint is gone"
    page = (out / "article.md").read_text()
    assert "| load by all ranks | warm |" in page and "toy sizes" in page and "| a killed rank | not measured yet |" in page
