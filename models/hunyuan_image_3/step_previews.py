"""What a picture will look like, told after every step, without holding up the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from .denoise import StepTrace

Report = Callable[[dict[str, Any]], None]


class StepPreviews:
    """A ``trace`` of :func:`.denoise.sample` that reports every step: what the picture would be if its velocity held to the end, which is clear long
    before the noisy latent is.

    On CUDA a step is told once the next one has been launched: else the device would rest while the host waits, copies and tells.
    """

    def __init__(self, sigmas: torch.Tensor, report: Report, settle: Callable[[torch.cuda.Event | None], None]):
        """``sigmas [N+1]``. ``settle`` waits until the device has reached an event (None: there is no device to wait for) and raises where what it has
        computed so far may not be seen."""
        self._sigmas, self._report, self._settle = sigmas, report, settle
        self._launched: deque[tuple[int, torch.Tensor, torch.cuda.Event | None]] = deque()

    def __call__(self, index: int, step: StepTrace) -> None:
        expected = step.latent_in - float(self._sigmas[index]) * step.pred
        reached = None
        if expected.is_cuda:
            expected = torch.empty_like(expected, device="cpu", pin_memory=True).copy_(expected, non_blocking=True)
            reached = torch.cuda.Event()
            reached.record()
        self._launched.append((index, expected, reached))
        total = len(self._sigmas) - 1
        while self._launched and (len(self._launched) > 1 or reached is None or index + 1 == total):
            done, latents, reached_then = self._launched.popleft()
            self._settle(reached_then)
            self._report({"kind": "steps", "done": done + 1, "total": total, "latents": latents})
