"""What a rank tells the others, and the user, about itself: one JSON record in the store.

Imports the standard library and torch.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from .plan import ParallelPlan


@dataclass
class RankRecord:
    """Fields of one rank's status. Units: bytes, seconds."""

    rank: int
    pid: int
    host: str
    url: str
    device: str
    plan: str = ""
    place: dict[str, int] = field(default_factory=dict)
    """Plan coordinates: shard, replica, logical_tp_rank."""
    generation: int = 0
    phase: str = "idle"
    done: int = 0
    total: int = 0
    tokens_per_s: float | None = None
    text_path: str = ""
    """How the last text was written, in words."""
    s_per_step: float | None = None
    digest: str = ""
    """Digest of the last section's result."""
    error: str = ""
    phase_seconds: dict[str, float] = field(default_factory=dict)
    """Phases of the last section that ended."""
    memory: dict[str, int] = field(default_factory=dict)


class RecordKeeper:
    """This rank's record. Sections change it on the executor thread, the monitor thread publishes it."""

    def __init__(self, record: RankRecord):
        self._record = record
        self._lock = threading.Lock()
        self._phase_start = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._unit = "step"

    def take_place(self, plan: ParallelPlan, generation: int) -> None:
        with self._lock:
            self._record.plan = plan.describe()
            self._record.generation = generation
            self._record.place = {
                "shard": plan.shard,
                "replica": plan.replica,
                "logical_tp_rank": plan.logical_tp_rank,
            }

    def start_section(self, phase: str) -> None:
        with self._lock:
            self._seconds = {}
            self._record.phase = "idle"
            self._begin(phase, "step")

    def start_phase(self, phase: str, unit: str) -> None:
        """``unit``: what ``progress`` counts, ``step`` or ``token``."""
        with self._lock:
            self._begin(phase, unit)

    def progress(self, done: int, total: int) -> None:
        with self._lock:
            self._record.done, self._record.total = done, total
            seconds = time.monotonic() - self._phase_start
            if done > 0 and seconds > 0:
                if self._unit == "token":
                    self._record.tokens_per_s = done / seconds
                else:
                    self._record.s_per_step = seconds / done

    def note_text(self, path: str) -> None:
        with self._lock:
            self._record.text_path = path

    def end_section(self, *, digest: str | None = None, error: str = "") -> dict[str, float]:
        """Returns the seconds of each phase."""
        with self._lock:
            self._begin("idle", "step")
            self._record.phase_seconds = dict(self._seconds)
            if digest is not None:
                self._record.digest = digest
            self._record.error = error
            return dict(self._seconds)

    def _begin(self, phase: str, unit: str) -> None:
        now = time.monotonic()
        old = self._record.phase
        if old != "idle":
            self._seconds[old] = self._seconds.get(old, 0.0) + now - self._phase_start
        self._phase_start = now
        self._unit = unit
        self._record.phase, self._record.done, self._record.total = phase, 0, 0

    def where(self) -> tuple[str, str]:
        """Phase, and the step in work, as ``step 3 of 50`` when two are done (nothing when the phase counts
        nothing).
        """
        with self._lock:
            record = self._record
            current = min(record.done + 1, record.total)
            return record.phase, f"{self._unit} {current} of {record.total}" if record.total else ""

    def to_json(self) -> dict[str, Any]:
        with self._lock:
            self._record.memory = read_memory(self._record.device)
            return asdict(self._record)


def read_memory(device: str) -> dict[str, int]:
    """``resident_set`` of the process, and what torch holds on a CUDA device."""
    with open("/proc/self/statm") as file:
        memory = {"resident_set": int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")}
    if device.startswith("cuda") and torch.cuda.is_initialized():
        memory["device_allocated"] = torch.cuda.memory_allocated(device)
        memory["device_reserved"] = torch.cuda.memory_reserved(device)
        memory["device_free"] = torch.cuda.mem_get_info(device)[0]
    return memory
