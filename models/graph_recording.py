"""Recording what a function launches into a CUDA graph, in a process where other threads use the device too."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Result = TypeVar("Result")


def record_graph(launch: Callable[[], Result], pool: tuple[int, int] | None = None) -> tuple[torch.cuda.CUDAGraph, Result]:
    """The graph of ``launch`` and what it returned, whose tensors every replay writes again. Waits for the device without a limit, so whoever has peers
    waits with one before. ``pool``: memory that graphs share which never run at the same time."""
    graph = torch.cuda.CUDAGraph()
    # Other threads of the process may talk to the device while this one records. This one must not free anything there, which collecting garbage may.
    with _uncollected(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = launch()
    return graph, result


@contextmanager
def _uncollected() -> Iterator[None]:
    """Automatic garbage collection rests."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
