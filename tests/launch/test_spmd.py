"""Programs of several ranks without ComfyUI: one sentence for a rank that fails."""

from __future__ import annotations

import pytest

from phase_parallel.launch import spmd
from phase_parallel.launch.errors import LaunchError


def test_the_first_rank_that_failed_is_named() -> None:
    """The options lack what the check needs, so every rank ends at once."""
    with pytest.raises(LaunchError, match=r"Rank [01] of the check ended with exit code \d+"):
        spmd.start_ranks(["check"], {"ranks": 2})
