"""Triton kernels run on the GPU where there is one, else in Triton's interpreter, which tests/conftest.py has chosen."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def triton_device() -> torch.device:
    pytest.importorskip("triton")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
