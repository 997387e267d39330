"""Programs of several ranks without ComfyUI: one device each, one sentence for a rank that fails."""

from __future__ import annotations

import pytest

from phase_parallel.launch import spmd
from phase_parallel.launch.errors import LaunchError


@pytest.mark.parametrize(("visible", "rank", "seen"), [("", 2, "2"), ("4,5,6", 1, "5"), ("GPU-a,GPU-b", 0, "GPU-a")])
def test_each_rank_sees_its_own_device(monkeypatch: pytest.MonkeyPatch, visible: str, rank: int, seen: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    spmd.see_one_device(rank)
    assert spmd.os.environ["CUDA_VISIBLE_DEVICES"] == seen


def test_a_rank_without_a_device_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(LaunchError, match=r"Rank 1 has no GPU: CUDA_VISIBLE_DEVICES names 1; start fewer ranks."):
        spmd.see_one_device(1)


def test_the_first_rank_that_failed_is_named() -> None:
    """The options lack what the check needs, so every rank ends at once."""
    with pytest.raises(LaunchError, match=r"Rank [01] of the check ended with exit code \d+"):
        spmd.start_ranks(["check"], {"ranks": 2})
