"""Where this rank's device is among the collectives it was told to do, for a thread that only looks on.

A collective of NCCL waits on the device, without a limit and deaf to faults. The main thread mostly looks at faults while it waits for the device, but
many operations of PyTorch wait for it without saying so.
"""

from __future__ import annotations

import time

import torch


class DeviceWatch:
    """:meth:`issued` is for the thread that issues the collectives, :meth:`overdue` for the one that looks on."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None
        self._issued = 0
        self._seen, self._since = 0, 0.0

    def issued(self) -> None:
        """A collective was put into the current stream. One that is being recorded into a graph does not count: it runs later, and often."""
        if torch.cuda.is_current_stream_capturing():
            return
        if self._event is None:
            self._event = torch.cuda.Event()
        self._event.record()
        self._issued += 1

    def overdue(self, limit_s: float) -> bool:
        """Has the device stood before the same collective for ``limit_s``, as far as the calls of this method have seen?"""
        if self._issued != self._seen:
            self._seen, self._since = self._issued, time.monotonic()
            return False
        return self._event is not None and time.monotonic() - self._since > limit_s and not self._event.query()
