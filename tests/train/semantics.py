"""A small fixed set of unseen wishes, drawn by real ranks under any plan, in working order or with a planted fault; each run is made once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rank_pool import RankPool

from phase_parallel.train.suites import Suite

HERE = Path(__file__).parent
PLANS: dict[str, dict[str, Any]] = {
    "single": {"name": "single"},
    "tp4": {"name": "tp"},
    "hybrid-sp": {"name": "hybrid", "denoise": "sp"},
    "hybrid-cfg": {"name": "hybrid", "denoise": "cfg"},
}
COUNT: dict[Suite, int] = {"t2i": 12, "think": 4, "edit1": 6, "edit2": 6, "ratio": 20, "distil": 8}
STEPS = 12
"""Fewer than the checkpoint's own 50, so that four processes on two cores need seconds for a picture."""
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Drawn:
    """`pictures`: uint8 `[H, W, 3]`; `accuracy`: from 0 to 1, the suite's main figure; `sentences`: the judge's."""

    pictures: tuple[np.ndarray, ...]
    accuracy: float
    sentences: tuple[str, ...]
    digests: tuple[str, ...]


class Gallery:
    """Starts the ranks of each world size when they are first needed."""

    def __init__(self, checkpoint: Path, files: Path, *, steps: int = STEPS, count: dict[Suite, int] = COUNT) -> None:
        self._checkpoint, self._files, self._steps, self._count = checkpoint, files, steps, count
        self._pools: dict[int, RankPool] = {}
        self._drawn: dict[tuple[str, Suite, str | None], Drawn] = {}

    def draw(self, plan: str, suite: Suite, fault: str | None = None) -> Drawn:
        key = (plan, suite, fault)
        if key not in self._drawn:
            self._drawn[key] = self._run(plan, suite, fault)
        return self._drawn[key]

    def _run(self, plan: str, suite: Suite, fault: str | None) -> Drawn:
        pictures = self._files / f"{len(self._drawn)}.npz"
        asked = {"folder": str(self._checkpoint), "plan": PLANS[plan], "suite": suite, "count": self._count[suite], "steps": self._steps}
        replies = self._pool(1 if plan == "single" else 4).run("draw", **asked, pictures=str(pictures), fault=fault, timeout_s=TIMEOUT_S)
        assert [reply.error for reply in replies] == [""] * len(replies)
        results = [reply.result for reply in replies]
        with np.load(pictures) as stored:
            arrays = tuple(stored[name] for name in stored.files)
        return Drawn(arrays, results[0]["accuracy"], tuple(results[0]["sentences"]), tuple(result["digest"] for result in results))

    def _pool(self, ranks: int) -> RankPool:
        if ranks not in self._pools:
            helpers = os.pathsep.join([str(HERE.parent / "parallel"), os.environ.get("PYTHONPATH", "")])
            self._pools[ranks] = RankPool(HERE / "semantic_program.py", ranks, lambda rank, store: {"PYTHONPATH": helpers})
        return self._pools[ranks]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@contextmanager
def gallery(checkpoint: Path, files: Path, **settings: Any) -> Iterator[Gallery]:
    opened = Gallery(checkpoint, files, **settings)
    try:
        yield opened
    finally:
        opened.close()


def psnr(one: np.ndarray, other: np.ndarray) -> float:
    """In dB, over all pixels and channels of two uint8 pictures of equal shape; infinity for equal ones."""
    assert one.shape == other.shape, (one.shape, other.shape)
    error = float(np.mean((one.astype(np.float64) - other) ** 2))
    return float("inf") if error == 0 else 10 * float(np.log10(255**2 / error))
