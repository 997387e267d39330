"""Triton kernels run on the GPU where there is one, else in Triton's interpreter on the CPU (chosen before any kernel is defined)."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def triton_device() -> torch.device:
    pytest.importorskip("triton")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
