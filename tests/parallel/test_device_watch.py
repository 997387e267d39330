"""What the monitor learns of a device that stands before a collective. The device is a stand-in; that NCCL's kernels end is shown on GPUs."""

from __future__ import annotations

import pytest
import torch

from phase_parallel.parallel import device_watch
from phase_parallel.parallel.device_watch import DeviceWatch


class Device:
    """``reached``: has it done all it was told? ``recording``: is a graph being recorded?"""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.recording, self.now = False, False, 100.0
        monkeypatch.setattr(torch.cuda, "Event", lambda: self)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.recording)
        monkeypatch.setattr(device_watch.time, "monotonic", lambda: self.now)

    def record(self) -> None:
        assert not self.recording, "an event in a graph cannot be asked"

    def query(self) -> bool:
        return self.reached


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def looks(watch: DeviceWatch, device: Device, seconds: float, every: float = 0.2) -> list[bool]:
    found = []
    while seconds > 0:
        found.append(watch.overdue(10.0))
        device.now += every
        seconds -= every
    return found


def test_a_device_that_stands_is_overdue_after_the_limit(device: Device) -> None:
    watch = DeviceWatch()
    watch.issued()
    assert not any(looks(watch, device, 9.5))
    device.now += 1.0
    assert watch.overdue(10.0)


def test_a_device_that_has_done_all_is_never_overdue(device: Device) -> None:
    watch = DeviceWatch()
    watch.issued()
    device.reached = True
    assert not any(looks(watch, device, 60.0))


def test_a_device_that_goes_on_is_not_overdue(device: Device) -> None:
    """It never reaches the last collective, because another one is always behind."""
    watch = DeviceWatch()
    for _ in range(60):
        watch.issued()
        assert not any(looks(watch, device, 1.0))


def test_without_a_collective_nothing_is_overdue(device: Device) -> None:
    watch = DeviceWatch()
    assert not any(looks(watch, device, 60.0))


def test_what_is_recorded_into_a_graph_does_not_count(device: Device) -> None:
    watch = DeviceWatch()
    device.recording = True
    watch.issued()
    device.recording = False
    assert not any(looks(watch, device, 60.0))
