"""Triton kernels run on the GPU where there is one, else in Triton's interpreter on the CPU, which tests/conftest.py has chosen."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def triton_device() -> torch.device:
    pytest.importorskip("triton")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def bf16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter keeps bf16 as bits and multiplies those; here it widens them first, as the matrix unit does."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    tl = pytest.importorskip("triton.language")
    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def widened(self: object, a: object, b: object, *rest: object) -> object:
        return dot(self, *(self.cast_impl(part, tl.float32) if part.dtype == tl.bfloat16 else part for part in (a, b)), *rest)

    monkeypatch.setattr(builder, "create_dot", widened)
