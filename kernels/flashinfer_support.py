"""FlashInfer where it is installed and its kernels are built: nothing of it is compiled here, because that can take hours without a word."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

BUILT = "run `flashinfer download-kernels`, which installs its built kernels for your CUDA"
"""What a user does about a module that is not built."""


class FlashInferError(ValueError):
    """FlashInfer was asked for and cannot do it here; the sentence says why and what to choose instead."""


@functools.cache
def why_not_installed(device: torch.device) -> str | None:
    """None when ``flashinfer`` can be imported for ``device``, else the reason for a message."""
    if device.type != "cuda":
        return "no CUDA device"
    if torch.version.cuda is None:  # PyTorch for other makers calls their devices cuda too
        return "FlashInfer needs an NVIDIA GPU"
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed"
    try:
        importlib.import_module("flashinfer")
    except (ImportError, RuntimeError, OSError) as error:
        return f"FlashInfer cannot be imported: {first_line(error)}"
    return None


def why_not_built(module: str, maker: str) -> str | None:
    """None when the kernels that ``maker`` of FlashInfer's ``module`` describes lie ready, else the reason. Builds nothing."""
    try:
        spec = getattr(importlib.import_module(module), maker)()
        ready = spec.is_compiled
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        return f"FlashInfer {version()} does not offer {maker}: {first_line(error)}"
    return None if ready else f"FlashInfer {version()} has not built its {spec.name} and building it can take hours; {BUILT}"


def version() -> str:
    return str(getattr(importlib.import_module("flashinfer"), "__version__", "of unknown version"))


def function(module: str, name: str) -> Callable[..., Any]:
    """Late, so that nothing is imported before somebody asks for FlashInfer."""
    found: ModuleType = importlib.import_module(module)
    return getattr(found, name)


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
