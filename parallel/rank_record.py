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
from .topology import Topology


@dataclass
class RankRecord:
    """Fields of one rank's status, the one schema that the Ranks node, `phase-parallel status` and the page show. Units: bytes, seconds, and
    seconds since 1970 for moments (``*_at``).
    """

    rank: int
    pid: int
    host: str
    url: str
    device: str
    device_name: str = ""
    """The GPU's name and which one it is; empty until its driver has been asked."""
    plan: str = ""
    place: dict[str, int] = field(default_factory=dict)
    """Plan coordinates: shard, replica, logical_tp_rank."""
    groups: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    """Phase (AR, denoise) -> kind of group (TP, SP, CFG) -> [place in it, its size]; groups of one rank are left out."""
    generation: int = 0
    model: str = ""
    """Name of the checkpoint whose weights are resident; empty when there are none."""
    phase: str = "idle"
    unit: str = "step"
    """What ``done`` and ``total`` count."""
    done: int = 0
    total: int = 0
    tokens_per_s: float | None = None
    """Of the last text, or the one at work."""
    tokens: int = 0
    text_path: str = ""
    """How the last text was written, in words."""
    text_at: float | None = None
    s_per_step: float | None = None
    """Of the last picture, or the one at work."""
    steps: int = 0
    picture_at: float | None = None
    digest: str = ""
    """Digest of the last section's result."""
    error: str = ""
    """The latest error. It stays when later work succeeds; ``error_at`` says how old it is."""
    error_at: float | None = None
    phase_seconds: dict[str, float] = field(default_factory=dict)
    """Phases of the last section that ended."""
    memory: dict[str, int] = field(default_factory=dict)


CALL = "call"
"""Unit of a section that is one step of a sampler outside of it."""


class RecordKeeper:
    """This rank's record. Sections change it on the executor thread, the monitor thread publishes it."""

    def __init__(self, record: RankRecord):
        self._record = record
        self._lock = threading.Lock()
        self._phase_start = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._run = ""
        """The prompt and node at work."""
        self._drawn: tuple[str, int, float] = ("", 0, 0.0)
        """Run, calls and their seconds of the picture whose steps are sections."""

    def take_place(self, plan: ParallelPlan, generation: int) -> None:
        with self._lock:
            self._record.plan = plan.describe()
            self._record.generation = generation
            self._record.place = {
                "shard": plan.shard,
                "replica": plan.replica,
                "logical_tp_rank": plan.logical_tp_rank,
            }
            self._record.groups = {"AR": _groups(plan.topology("decode")), "denoise": _groups(plan.topology("denoise"))}

    def start_section(self, phase: str, run: str = "") -> None:
        """``run``: what the sections of one picture have in common."""
        with self._lock:
            self._seconds = {}
            self._run = run
            self._record.phase = "idle"
            self._begin(phase, "step")

    def start_phase(self, phase: str, unit: str) -> None:
        """``unit``: what ``progress`` counts: ``token``, ``step``, or anything else, of which no rate is kept."""
        with self._lock:
            self._begin(phase, unit)

    def progress(self, done: int, total: int) -> None:
        with self._lock:
            record = self._record
            record.done, record.total = done, total
            seconds = time.monotonic() - self._phase_start
            if done <= 0 or seconds <= 0:
                return
            if record.unit == "token":
                record.tokens_per_s, record.tokens, record.text_at = done / seconds, done, time.time()
            elif record.unit == "step":
                self._note_picture(done, seconds / done)

    def note_model(self, name: str) -> None:
        """Which checkpoint is resident from now on; empty for none."""
        with self._lock:
            self._record.model = name

    def note_text(self, path: str, *, tokens: int, seconds: float) -> None:
        """The text at work is complete. ``seconds``: without reading the prompt, so from the second token on (one token has no speed)."""
        with self._lock:
            record = self._record
            record.text_path, record.tokens, record.text_at = path, tokens, time.time()
            record.tokens_per_s = (tokens - 1) / seconds if tokens > 1 and seconds > 0 else None

    def end_section(self, *, digest: str | None = None, error: str = "") -> dict[str, float]:
        """Returns the seconds of each phase."""
        with self._lock:
            record = self._record
            if record.unit == CALL and digest is not None:
                self._count_call(time.monotonic() - self._phase_start)
            self._begin("idle", "step")
            record.phase_seconds = dict(self._seconds)
            if digest is not None:
                record.digest = digest
            if error:
                record.error, record.error_at = error, time.time()
            return dict(self._seconds)

    def _count_call(self, seconds: float) -> None:
        run, calls, before = self._drawn
        if run != self._run:
            calls, before = 0, 0.0
        self._drawn = (self._run, calls + 1, before + seconds)
        self._note_picture(calls + 1, (before + seconds) / (calls + 1))

    def _note_picture(self, steps: int, s_per_step: float) -> None:
        record = self._record
        record.steps, record.s_per_step, record.picture_at = steps, s_per_step, time.time()

    def _begin(self, phase: str, unit: str) -> None:
        now = time.monotonic()
        record = self._record
        if record.phase != "idle":
            self._seconds[record.phase] = self._seconds.get(record.phase, 0.0) + now - self._phase_start
        self._phase_start = now
        record.phase, record.unit, record.done, record.total = phase, unit, 0, 0

    def where(self) -> tuple[str, str]:
        """Phase, and the step in work, as ``step 3 of 50`` when two are done (nothing when the phase counts
        nothing).
        """
        with self._lock:
            record = self._record
            current = min(record.done + 1, record.total)
            unit = "step" if record.unit == CALL else record.unit
            return record.phase, f"{unit} {current} of {record.total}" if record.total else ""

    def to_json(self) -> dict[str, Any]:
        # Outside the lock: a driver that is held up must hold up nobody who only notes progress.
        device = self._record.device
        memory, name = read_memory(device), self._record.device_name or name_device(device)
        with self._lock:
            record = self._record
            record.memory, record.device_name = memory, name
            return asdict(record)


def _groups(topology: Topology) -> dict[str, list[int]]:
    sizes = {
        "TP": [topology.tp_rank, topology.tp_size],
        "SP": [topology.sp_rank, topology.sp_size],
        "CFG": [topology.cfg_rank, topology.cfg_size],
    }
    return {kind: place for kind, place in sizes.items() if place[1] > 1}


def name_device(device: str) -> str:
    """Empty for a GPU whose driver this process has not started: asking must not start it."""
    if not device.startswith("cuda"):
        return "CPU"
    if not torch.cuda.is_initialized():
        return ""
    visible = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    index = torch.device(device).index or 0
    number = visible[index] if index < len(visible) else str(index)
    return f"{torch.cuda.get_device_name(device)} (GPU {number})"


def read_memory(device: str) -> dict[str, int]:
    """``resident_set`` of the process now and its peak, the machine's memory, and what torch holds on a CUDA device, with its peak."""
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    memory = {"resident_set": _kilobytes(lines["VmRSS"]), "resident_peak": _kilobytes(lines["VmHWM"])}
    memory["host_total"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device.startswith("cuda") and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info(device)
        memory["device_allocated"] = torch.cuda.memory_allocated(device)
        memory["device_reserved"] = torch.cuda.memory_reserved(device)
        memory["device_peak"] = torch.cuda.max_memory_allocated(device)
        memory["device_free"], memory["device_total"] = free, total
    return memory


def _kilobytes(words: str) -> int:
    """``  1234 kB`` as bytes."""
    return int(words.split()[0]) * 1024
