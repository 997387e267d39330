"""Triton where it is installed: kernels compile on CUDA devices from sm_80 on, and run on CPU tensors when TRITON_INTERPRET=1 (tests)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for the CPU comes without it
    triton = None
    tl = None

OLDEST_CAPABILITY = (8, 0)


def jit(function: Callable[..., Any] | None = None, *, do_not_specialize: tuple[str, ...] = ()) -> Any:
    """``triton.jit``; without Triton the function itself, which nobody can then call as a kernel."""
    if function is None:
        return functools.partial(jit, do_not_specialize=do_not_specialize)
    return function if triton is None else triton.jit(function, do_not_specialize=list(do_not_specialize))


def interpreting() -> bool:
    return triton is not None and bool(triton.knobs.runtime.interpret)


def why_not(device: torch.device) -> str | None:
    """None when Triton kernels run on ``device``, else the reason for the message that names the backend."""
    if interpreting():
        return None
    if device.type != "cuda":
        return "no CUDA device"
    if torch.version.cuda is None:  # PyTorch for other makers calls their devices cuda too
        return "Triton kernels need an NVIDIA GPU"
    if triton is None:
        return "Triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        return f"Triton kernels need sm_80 and this GPU is sm_{capability[0]}{capability[1]}"
    return None


def next_power_of_2(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


@jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Nothing that an earlier kernel wrote may be read before this."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@jit
def let_next_start(OVERLAP: tl.constexpr):
    """The next kernel's programs may take free multiprocessors and load their weights; they wait for the end of this one before they read its results."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@functools.cache
def overlap_options(device: torch.device) -> dict[str, bool]:
    """Launch arguments of kernels that may start while the one before still runs (programmatic dependent launch, sm_90 on)."""
    if device.type != "cuda" or interpreting():
        return {"OVERLAP": False}
    able = torch.cuda.get_device_capability(device) >= (9, 0)
    return {"OVERLAP": able, "launch_pdl": able}
