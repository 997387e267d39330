"""Grouped products on Hopper: our CUDA kernel (``hopper_experts.cu``), whose pairs of blocks share what they read. Letters as in :mod:`.grouped_experts`.

Triton has no copies to several blocks' shared memory, and its tiles are bound by what they read from the L2 cache.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from .cuda_source import CudaKernel, CudaSourceError, TensorMap, compile_kernel, tensor_map, why_not_compiled
from .expert_groups import Groups
from .expert_views import MicroViews, WeightRows, matrices
from .sorted_rows import sort_rows

# Sizes of hopper_experts.cu.
TILE_ROWS = 128
DEPTH = 64
CLUSTER = 2
THREADS = 384
UP_COLUMNS, DOWN_COLUMNS = 128, 256
SHARED_BYTES = 232448
"""All that a block of sm_90 may have."""
MAXIMUM_EXPERTS = 739
"""So many numbers fit behind the stages."""


@functools.cache
def why_not_hopper(device: torch.device) -> str | None:
    """None when the kernel runs on ``device``, else the reason. Compiles it."""
    if device.type != "cuda" or torch.version.cuda is None:
        return "no CUDA device"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "the CUDA kernel is for sm_90"
    reason = why_not_compiled()
    if reason is not None:
        return reason
    try:
        for gated in (True, False):
            _kernel(gated, device.index or 0)
    except CudaSourceError as error:
        return str(error)
    return None


def hopper_fits(x: torch.Tensor, views: MicroViews, experts: int) -> bool:
    """Whether the sizes are whole tiles; every dtype but bfloat16 runs elsewhere."""
    hidden, (w1, w2) = views.w1.shape[2], matrices(views)
    if w1 is None or w2 is None or not (w1.aligned and w2.aligned) or experts > MAXIMUM_EXPERTS or x.dtype != torch.bfloat16:
        return False
    whole = views.width % UP_COLUMNS == 0 and (views.micros * views.width) % (CLUSTER * UP_COLUMNS) == 0
    return whole and views.width % DEPTH == 0 and hidden % (CLUSTER * DOWN_COLUMNS) == 0 and why_not_hopper(x.device) is None


def experts_by_clusters(x: torch.Tensor, views: MicroViews, groups: Groups, experts: int, topk: int) -> torch.Tensor:
    """``x [T, H]`` -> each pair's output of its expert, in the groups' order, ``[N, H]``. ``hopper_fits`` must hold."""
    hidden, pairs, inner = x.shape[1], groups.row_of.shape[0], views.micros * views.width
    w1, w2 = matrices(views)
    act = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    # The tokens in order are dead once the first product is done: the outputs take their place.
    taken = torch.empty(2, dtype=torch.int32, device=x.device)
    parts = sort_rows(x, groups.place_of, topk, zeroed=taken)
    blocks = views.width // UP_COLUMNS
    _multiply(True, parts, w1, groups.ends, taken[:1], act, experts, blocks * views.micros, blocks, hidden // DEPTH, hidden // DEPTH, views.width)
    depth = views.width // DEPTH
    _multiply(False, act, w2, groups.ends, taken[1:], parts, experts, hidden // DOWN_COLUMNS, hidden // DOWN_COLUMNS, depth * views.micros, depth, 0)
    return parts


def _multiply(
    gated: bool, rows: torch.Tensor, weights: WeightRows, ends: torch.Tensor, taken: torch.Tensor, out: torch.Tensor, experts: int, columns: int,
    blocks: int, steps: int, micro_steps: int, gate_rows: int,
) -> None:  # fmt: skip
    """``columns``: blocks of columns, all together; the others as the kernel has them."""
    pairs = columns // CLUSTER
    pieces = (-(-rows.shape[0] // TILE_ROWS) + experts) * pairs
    clusters = min(_multiprocessors(rows.device) // CLUSTER, pieces)
    numbers = (out.stride(0), experts, pairs, blocks, steps, micro_steps, gate_rows, weights.expert_rows, weights.micro_rows, weights.micro_columns)
    arguments = (
        _map(rows.data_ptr(), rows.shape[0], rows.shape[1], rows.stride(0), TILE_ROWS // CLUSTER),
        _map(weights.base.data_ptr(), weights.rows, weights.columns, weights.row_stride, 128),
        _map(out.data_ptr(), out.shape[0], out.shape[1], out.stride(0), 64),
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (ends, taken, out)), *map(ctypes.c_int, numbers),
    )  # fmt: skip
    _kernel(gated, rows.device.index or 0).launch(clusters * CLUSTER, THREADS, arguments)


def _map(address: int, rows: int, columns: int, row_stride: int, box_rows: int) -> TensorMap:
    return tensor_map(address, rows, columns, row_stride, box_rows, DEPTH)


def _kernel(gated: bool, device: int) -> CudaKernel:
    return compile_kernel("hopper_experts.cu", "multiply_groups", (f"GATED={int(gated)}",), "sm_90a", SHARED_BYTES, device)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
