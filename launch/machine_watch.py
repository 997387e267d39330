"""The machines of one launch end together: each tells the others that it lives, is ready, or has ended. Runs in a thread beside the agent."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..parallel.store import JsonStore  # imports torch, and `status` needs none

BEAT_S = 1.0
SILENT_S = 6.0
"""A machine not heard of for so long has lost its launcher or its network; its ranks and ours must be gone within ten seconds."""


class MachineWatch(threading.Thread):
    """``failure`` is set, and the agent told to stop, when another machine has ended."""

    def __init__(self, number: int, count: int, store: JsonStore, launch_id: str) -> None:
        super().__init__(name="machines", daemon=True)
        self.failure: str | None = None
        self._number = number
        self._store = store
        self._at = f"{launch_id}/"
        self._others = [other for other in range(count) if other != number]
        self._heard = {number: (-1, time.monotonic()) for number in self._others}
        self._stopped = threading.Event()

    def tell_ready(self) -> None:
        self._store.set(f"{self._at}ready/{self._number}", True)

    def all_ready(self) -> bool:
        return all(self._store.find(f"{self._at}ready/{number}") for number in self._others)

    def end(self, why: str) -> None:
        """This machine's ranks are gone: the others shall end too. Without machine 0 they know already."""
        self._stopped.set()
        try:
            self._store.set_first(f"{self._at}ended", [self._number, why])
        except RuntimeError:
            return

    def run(self) -> None:
        count = 0
        while not self._stopped.wait(BEAT_S):
            count += 1
            try:
                self._store.set(f"{self._at}beat/{self._number}", count)
                reason = self._look()
            except RuntimeError:
                reason = "machine 0 and its store have ended"
            if reason and not self._stopped.is_set():
                self.failure = f"All ranks of this machine were stopped: {reason}."
                os.kill(os.getpid(), signal.SIGTERM)  # the agent ends the ranks on it
                return

    def _look(self) -> str:
        """Why this machine has to end, or nothing."""
        ended = self._store.find(f"{self._at}ended")
        if ended is not None:
            return f"machine {ended[0]} has ended ({ended[1]})"
        now = time.monotonic()
        for number in self._others:
            beat = self._store.find(f"{self._at}beat/{number}") or 0
            if beat != self._heard[number][0]:
                self._heard[number] = (beat, now)
            elif now - self._heard[number][1] > SILENT_S:
                return f"machine {number} has not answered for {SILENT_S:.0f} s"
        return ""
