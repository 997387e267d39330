"""Which ranks are alive: heartbeats through the store, and process ids of this machine. Imports the standard
library.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .store import JsonStore

BEAT_S = 1.0


@dataclass(frozen=True)
class _Beat:
    """Last heartbeat of another rank; ``seen`` is our own clock, because the clocks of machines differ."""

    count: int
    seen: float
    waiting: bool


class Hearts:
    """This rank's heartbeat, and what it has heard of the others'. A rank never heard of counts from our
    start.
    """

    def __init__(self, store: JsonStore, rank: int, world_size: int):
        self._store = store
        self._rank = rank
        self._count = 0
        self._lock = threading.Lock()
        now = time.monotonic()
        self._heard_at: float | None = None
        """When this rank listened last."""
        self._places: dict[int, dict[str, Any]] = {}
        """First record of each other rank: its machine and process stay the same."""
        self._beats = {other: _Beat(-1, now, True) for other in range(world_size) if other != rank}

    def beat(self, *, waiting: bool) -> None:
        """Tell the others that this rank lives, and whether it waits for them; listen to theirs."""
        self._count += 1
        self._store.set(f"beat/{self._rank}", [self._count, waiting])
        for rank, last in list(self._beats.items()):
            value = self._store.find(f"beat/{rank}")
            if value is not None and value[0] != last.count:
                with self._lock:
                    self._beats[rank] = _Beat(value[0], time.monotonic(), value[1])
        self._heard_at = time.monotonic()

    def stale(self, limit_s: float) -> tuple[int, ...]:
        """Ranks not heard of for ``limit_s`` when this rank listened last: while it was held up itself nobody counts as silent."""
        now = self._heard_at or time.monotonic()
        with self._lock:
            return tuple(rank for rank, beat in self._beats.items() if now - beat.seen > limit_s)

    def busy(self) -> tuple[int, ...]:
        """Ranks that were not waiting at their last heartbeat."""
        with self._lock:
            return tuple(rank for rank, beat in self._beats.items() if not beat.waiting)

    def lost(self) -> tuple[int, ...]:
        """Ranks of this machine whose process has ended."""
        for rank in set(self._beats) - set(self._places):
            record = self._store.find(f"record/{rank}")
            if record is not None:
                self._places[rank] = record
        return ended_ranks(self._places.values())


def ended_ranks(records: Iterable[dict[str, Any]]) -> tuple[int, ...]:
    """Of ``records``, the ranks that ran on this machine and whose process has ended."""
    mine = socket.gethostname()
    return tuple(r["rank"] for r in records if r["host"] == mine and not _process_runs(r["pid"]))


def _process_runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            # The command's name may hold spaces and brackets; the state is the first word after the last
            # bracket.
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False
