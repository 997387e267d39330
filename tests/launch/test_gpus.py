"""One GPU for each rank, or fewer where that was allowed."""

from __future__ import annotations

import pytest
import torch

from phase_parallel.launch import gpus
from phase_parallel.launch.errors import LaunchError
from phase_parallel.parallel.environment import SHARE_GPU


@pytest.mark.parametrize(
    ("visible", "rank", "share", "seen"),
    [("", 2, "", "2"), ("4,5,6", 1, "", "5"), ("GPU-a,GPU-b", 0, "", "GPU-a"), ("4,5", 3, "allowed", "5"), ("", 4, "allowed", "1"), ("", 1, "1", "1")],
)
def test_what_each_rank_sees(monkeypatch: pytest.MonkeyPatch, visible: str, rank: int, share: str, seen: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv(SHARE_GPU, share)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    gpus.see_one_gpu(rank)
    assert gpus.os.environ["CUDA_VISIBLE_DEVICES"] == seen


def test_a_rank_without_a_gpu_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.delenv(SHARE_GPU, raising=False)
    with pytest.raises(LaunchError, match=r"Rank 1 has no GPU: CUDA_VISIBLE_DEVICES names 1; start fewer ranks."):
        gpus.gpu_of(1)


@pytest.mark.parametrize(("found", "share", "for_four"), [(2, "", 2), (2, "allowed", 4), (8, "allowed", 8), (0, "allowed", 0)])
def test_how_many_there_are(monkeypatch: pytest.MonkeyPatch, found: int, share: str, for_four: int) -> None:
    monkeypatch.setenv(SHARE_GPU, share)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    assert gpus.gpus_for(4) == for_four
