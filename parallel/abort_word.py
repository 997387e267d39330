"""A word in the host's memory that ends the waiting of kernels: they read it while they run, so no stream and no launch is needed to reach them."""

from __future__ import annotations

import torch


class AbortWord:
    """``tensor`` int32 ``[1]``, 0 until :meth:`set`; pinned memory where kernels of a CUDA device shall read it."""

    def __init__(self, *, pinned: bool):
        self.tensor = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=pinned)
        # Written past torch: the monitor thread sets what a thread in inference mode has made.
        self._host = self.tensor.numpy()

    def set(self) -> None:
        """For good: who waits after this would wait for peers that have left."""
        self._host[0] = 1
