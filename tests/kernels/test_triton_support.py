"""Where Triton kernels run, and the reason where they do not."""

from __future__ import annotations

import pytest
import torch

from phase_parallel.kernels import triton_support
from phase_parallel.kernels.triton_support import next_power_of_2, why_not

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def real_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "interpreting", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    assert why_not(CUDA) is None
    assert why_not(torch.device("cpu")) == "no CUDA device"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert why_not(CUDA) == "Triton kernels need sm_80 and this GPU is sm_75"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert why_not(CUDA) == "Triton kernels need an NVIDIA GPU"


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "triton", None)
    assert why_not(CUDA) == "Triton is not installed"


def test_next_power_of_2() -> None:
    assert [next_power_of_2(value) for value in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
