"""The clock of one whole picture: seconds and peak memory of every part, one behind the other, so that the parts add up to the whole; and the proof
that the weights stay where they are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .errors import BenchError
from .timing import synchronize

ROOM = 1 << 20
"""Bytes that a switch of phases may allocate: less than any matrix of the model, more than what host and device exchange in it."""


class PartClock:
    """Starts when it is made. ``seconds`` and, on CUDA, ``peaks`` (allocated bytes) by part."""

    def __init__(self, device: torch.device):
        self._device = device
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, int] = {}
        synchronize(device)
        self._reset_peak()
        self._last = time.perf_counter()

    def end(self, part: str, *, wait: bool = True) -> None:
        """What was done since the last part has ended is ``part``; also of work that goes on on the device, without ``wait``."""
        if wait:
            synchronize(self._device)
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        if self._device.type == "cuda":
            self.peaks[part] = max(self.peaks.get(part, 0), torch.cuda.max_memory_allocated(self._device))
            self._reset_peak()
        self._last = now

    def move(self, seconds: float, source: str, part: str) -> None:
        """Of what was counted as ``source``, ``seconds`` were another part."""
        self.seconds[source] -= seconds
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0

    def _reset_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)


@dataclass(frozen=True)
class Residence:
    """Where every resident tensor lies."""

    places: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, resident: Mapping[str, torch.Tensor]) -> Residence:
        return cls({name: (tensor.data_ptr(), tensor.nbytes) for name, tensor in resident.items()})

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.places.values())

    def moved_bytes(self, resident: Mapping[str, torch.Tensor]) -> int:
        """Of the tensors that lie elsewhere now."""
        now = Residence.of(resident).places
        return sum(nbytes for name, (place, nbytes) in self.places.items() if now.get(name) != (place, nbytes))

    def require_unmoved(self, resident: Mapping[str, torch.Tensor], when: str) -> None:
        """Raises BenchError when a tensor lies elsewhere now."""
        now = Residence.of(resident).places
        moved = [name for name in self.places.keys() | now.keys() if self.places.get(name) != now.get(name)]
        if moved:
            raise BenchError(f"{len(moved)} of {len(self.places)} weights lie elsewhere {when}, the first of them {min(moved)}")


def require_no_copy(before: int, peak: int) -> None:
    """Raises BenchError when a switch that began with ``before`` allocated bytes had ``peak`` of them at once: room for a copy of weights."""
    if peak - before > ROOM:
        raise BenchError(f"the switch to denoise allocated {peak - before} bytes, and a change of views needs none")
