"""Clocks of the benchmarks: warm-up, repeats, median with minimum and maximum; the device is awaited."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch

WARM_UP = 2


@dataclass(frozen=True)
class Spread:
    """Milliseconds."""

    median: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        ordered = sorted(values)
        return cls(ordered[len(ordered) // 2], ordered[0], ordered[-1])

    def scaled(self, factor: float) -> Spread:
        return Spread(self.median * factor, self.minimum * factor, self.maximum * factor)

    def __str__(self) -> str:
        return f"{self.median:8.3f} ({self.minimum:.3f} … {self.maximum:.3f})"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_milliseconds(
    run: Callable[[], object], device: torch.device, *, repeats: int, barrier: Callable[[], None] = lambda: None, wait: bool = True
) -> Spread:
    """From the first launch to the end of the last kernel; all ranks start together. Without ``wait``, ``run`` itself waits for the work of the call
    before, so that calls in a row measure a steady stream and nobody is awaited in between."""
    values = []
    for number in range(WARM_UP + repeats):
        if wait:
            barrier()
            synchronize(device)
        began = time.perf_counter()
        run()
        if wait:
            synchronize(device)
        if number >= WARM_UP:
            values.append((time.perf_counter() - began) * 1e3)
    return Spread.of(values)


def kernel_split(run: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Microseconds of device time by kernel name, empty on a CPU. Kernels that start early wait inside their time, so the sum can exceed the whole."""
    if device.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize(device)
    times: dict[str, float] = defaultdict(float)
    for event in profiled.events():
        if event.device_time > 0:
            times[event.name[:80]] += event.device_time
    return dict(sorted(times.items(), key=lambda item: -item[1]))
