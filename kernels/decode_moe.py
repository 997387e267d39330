"""The mixture of experts for one token: three kernels whose time is the bytes of the weights they touch.

``router_and_shared`` chooses the experts and gives the shared expert's activation, ``routed_up`` the activations of the chosen experts, ``all_down``
the weighted sum of all down projections, shared expert included, in one fixed order.

Letters: E experts, K experts per token, H hidden, I width of a routed expert on this rank, J width of the shared expert on this rank.
Expert weights are micro views: ``w1 [E, 2·I, H]`` with [up, gate] rows, ``w2 [E, H, I]``; expert and row strides are free, columns are contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .gemv import LONGEST_TILE, gemv_eager, load_tile, load_vector
from .moe import ExpertBlock
from .router import route_eager
from .triton_support import jit, let_next_start, next_power_of_2, overlap_options, tl, triton, wait_for_previous


@dataclass(frozen=True)
class DecodeMoeBuffers:
    """What the three kernels hand on. ``logits [E]`` fp32, ``weights [K]`` fp32, ``ids [K]`` int32, ``shared [J]``, ``routed [K, I]``;
    ``arrived [1]`` int32 is zero between two launches."""

    logits: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    shared: torch.Tensor
    routed: torch.Tensor
    arrived: torch.Tensor

    @classmethod
    def make(cls, experts: int, topk: int, width: int, shared_width: int, dtype: torch.dtype, device: torch.device) -> DecodeMoeBuffers:
        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            zeros(experts, dtype=torch.float32), zeros(topk, dtype=torch.float32), zeros(topk, dtype=torch.int32),
            zeros(shared_width, dtype=dtype), zeros(topk, width, dtype=dtype), zeros(1, dtype=torch.int32),
        )  # fmt: skip


def router_and_shared_eager(
    x: torch.Tensor, router: torch.Tensor, shared_up: torch.Tensor, topk: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``x [H]``, ``router [E, H]`` fp32, ``shared_up [2·J, H]`` with [up, gate] rows -> logits ``[E]`` fp32, routing weights and ids ``[K]``,
    the likeliest expert first, and the shared activation ``[J]``."""
    up, gate = gemv_eager(x, shared_up, torch.float32).chunk(2)
    logits = gemv_eager(x, router, torch.float32)
    weights, ids = route_eager(logits.unsqueeze(0), topk)
    return logits, weights[0], ids[0], (up * F.silu(gate)).to(x.dtype)


def routed_up_eager(x: torch.Tensor, ids: torch.Tensor, w1: torch.Tensor) -> torch.Tensor:
    """``x [H]``, ``ids [K]`` -> activations ``[K, I]``."""
    up, gate = torch.stack([gemv_eager(x, w1[expert], torch.float32) for expert in ids]).chunk(2, dim=-1)
    return (up * F.silu(gate)).to(x.dtype)


def all_down_eager(
    routed: torch.Tensor, shared: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, w2: torch.Tensor, shared_down: torch.Tensor
) -> torch.Tensor:
    """``routed [K, I]``, ``shared [J]``, ``shared_down [H, J]`` -> this rank's summand ``[H]``."""
    total = gemv_eager(shared, shared_down, torch.float32)
    for weight, expert, activation in zip(weights, ids, routed, strict=True):
        total = total + weight * gemv_eager(activation, w2[expert], torch.float32)
    return total.to(routed.dtype)


@jit
def _router_and_shared(
    x, router, shared_up, logits, weights, ids, shared, arrived, experts, width, shared_stride,
    hidden: tl.constexpr, EVEN: tl.constexpr, ROUTER_PROGRAMS: tl.constexpr, RE: tl.constexpr, RS: tl.constexpr, BLOCK: tl.constexpr,
    E: tl.constexpr, K: tl.constexpr, PAD_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    program = tl.program_id(0)
    # The router comes first: its programs are done while the shared expert's still run.
    if program < ROUTER_PROGRAMS:
        _router(x, router, logits, experts, program, hidden, EVEN, RE, BLOCK, OVERLAP)
        tl.debug_barrier()
        if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == ROUTER_PROGRAMS - 1:
            tl.debug_barrier()
            _choose(logits, weights, ids, experts, E, K, PAD_K)
            tl.store(arrived, 0)
    else:
        _shared_up(x, shared_up, shared, width, shared_stride, program - ROUTER_PROGRAMS, hidden, EVEN, RS, BLOCK, OVERLAP)


@jit
def _router(x, router, logits, experts, program, hidden: tl.constexpr, EVEN: tl.constexpr, RE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    row = program * RE + tl.arange(0, RE)
    inside = (row < experts)[:, None]
    base = router + row[:, None] * hidden
    tile = load_tile(base, tl.arange(0, BLOCK), inside, hidden, EVEN)
    wait_for_previous(OVERLAP)
    total = tile * load_vector(x, tl.arange(0, BLOCK), hidden, EVEN)[None, :]
    for first in tl.static_range(BLOCK, hidden, BLOCK):
        column = first + tl.arange(0, BLOCK)
        total += load_tile(base, column, inside, hidden, EVEN) * load_vector(x, column, hidden, EVEN)[None, :]
    tl.store(logits + row, tl.sum(total, axis=1), mask=row < experts)


@jit
def _choose(logits, weights, ids, experts, E: tl.constexpr, K: tl.constexpr, PAD_K: tl.constexpr):
    """The K likeliest experts in falling order and their probabilities divided by their sum; equal ones go by their number."""
    number = tl.arange(0, E)
    logit = tl.load(logits + number, mask=number < experts, other=float("-inf"), volatile=True)
    p = tl.exp(logit - tl.max(logit, axis=0))
    p = p / tl.sum(p, axis=0)
    left = tl.where(number < experts, p, -1.0)
    place = tl.arange(0, PAD_K)
    best, chosen = tl.zeros([PAD_K], tl.float32), tl.zeros([PAD_K], tl.int32)
    for slot in tl.static_range(K):
        highest = tl.max(left, axis=0)
        expert = tl.min(tl.where(left == highest, number, E), axis=0)
        best = tl.where(place == slot, highest, best)
        chosen = tl.where(place == slot, expert, chosen)
        left = tl.where(number == expert, -1.0, left)
    tl.store(weights + place, best / tl.maximum(tl.sum(best, axis=0), 1e-8), mask=place < K)
    tl.store(ids + place, chosen, mask=place < K)


@jit
def _shared_up(
    x, shared_up, shared, width, stride, program,
    hidden: tl.constexpr, EVEN: tl.constexpr, RS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = program * RS + tl.arange(0, RS)
    inside = (row < width)[:, None]
    up_base = shared_up + row.to(tl.int64)[:, None] * stride
    gate_base = up_base + width.to(tl.int64) * stride
    # Whether the rows are even is another question than for the router.
    SURE: tl.constexpr = EVEN and RS == 1
    column = tl.arange(0, BLOCK)
    up_tile = load_tile(up_base, column, inside, hidden, SURE)
    gate_tile = load_tile(gate_base, column, inside, hidden, SURE)
    wait_for_previous(OVERLAP)
    value = load_vector(x, column, hidden, EVEN)[None, :]
    up, gate = up_tile.to(tl.float32) * value, gate_tile.to(tl.float32) * value
    for first in tl.static_range(BLOCK, hidden, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = load_vector(x, column, hidden, EVEN)[None, :]
        up += load_tile(up_base, column, inside, hidden, SURE).to(tl.float32) * value
        gate += load_tile(gate_base, column, inside, hidden, SURE).to(tl.float32) * value
    _store_gated(up, gate, shared + row, row < width)


@jit
def _store_gated(up, gate, out, inside):
    up, gate = tl.sum(up, axis=1), tl.sum(gate, axis=1)
    tl.store(out, up * gate * tl.sigmoid(gate), mask=inside)


@jit
def _routed_up(
    x, ids, w1, out, width, expert_stride, row_stride,
    hidden: tl.constexpr, EVEN: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    block, slot = tl.program_id(0), tl.program_id(1)
    row = block * R + tl.arange(0, R)
    inside = (row < width)[:, None]
    wait_for_previous(OVERLAP)
    up_base = w1 + tl.load(ids + slot).to(tl.int64) * expert_stride + row.to(tl.int64)[:, None] * row_stride
    gate_base = up_base + width.to(tl.int64) * row_stride
    up = tl.zeros([R, BLOCK], tl.float32)
    gate = tl.zeros([R, BLOCK], tl.float32)
    for first in tl.static_range(0, hidden, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = load_vector(x, column, hidden, EVEN)[None, :]
        up += load_tile(up_base, column, inside, hidden, EVEN).to(tl.float32) * value
        gate += load_tile(gate_base, column, inside, hidden, EVEN).to(tl.float32) * value
    _store_gated(up, gate, out + slot * width + row, row < width)


@jit
def _all_down(
    routed, shared, weights, ids, w2, shared_down, out, hidden, expert_stride, row_stride, shared_stride,
    width: tl.constexpr, shared_width: tl.constexpr, EVEN: tl.constexpr, SHARED_EVEN: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    row = tl.program_id(0) * R + tl.arange(0, R)
    inside = (row < hidden)[:, None]
    # The shared expert's weights need no choice, so they are under way first.
    shared_base = shared_down + row.to(tl.int64)[:, None] * shared_stride
    tile = load_tile(shared_base, tl.arange(0, BLOCK), inside, shared_width, SHARED_EVEN)
    wait_for_previous(OVERLAP)
    total = tile.to(tl.float32) * load_vector(shared, tl.arange(0, BLOCK), shared_width, SHARED_EVEN)[None, :]
    for first in tl.static_range(BLOCK, shared_width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = load_vector(shared, column, shared_width, SHARED_EVEN)
        total += load_tile(shared_base, column, inside, shared_width, SHARED_EVEN).to(tl.float32) * value[None, :]
    for slot in tl.static_range(K):
        weight = tl.load(weights + slot)
        base = w2 + tl.load(ids + slot).to(tl.int64) * expert_stride + row.to(tl.int64)[:, None] * row_stride
        for first in tl.static_range(0, width, BLOCK):
            column = first + tl.arange(0, BLOCK)
            value = load_vector(routed + slot * width, column, width, EVEN) * weight
            total += load_tile(base, column, inside, width, EVEN).to(tl.float32) * value[None, :]
    tl.store(out + row, tl.sum(total, axis=1), mask=row < hidden)


def router_and_shared_triton(
    x: torch.Tensor, router: torch.Tensor, shared_up: torch.Tensor, buffers: DecodeMoeBuffers, *, router_rows: int = 1, shared_rows: int = 4, warps: int = 8
) -> None:
    """As :func:`router_and_shared_eager` into ``buffers``."""
    experts, hidden = router.shape
    width, topk = shared_up.shape[0] // 2, buffers.ids.shape[0]
    block = min(LONGEST_TILE, next_power_of_2(hidden))
    programs = triton.cdiv(experts, router_rows)
    _router_and_shared[(programs + triton.cdiv(width, shared_rows),)](
        x, router, shared_up, buffers.logits, buffers.weights, buffers.ids, buffers.shared, buffers.arrived, experts, width, shared_up.stride(0),
        hidden=hidden, EVEN=hidden % block == 0 and experts % router_rows == 0, ROUTER_PROGRAMS=programs, RE=router_rows, RS=shared_rows, BLOCK=block,
        E=next_power_of_2(experts), K=topk, PAD_K=next_power_of_2(topk), num_warps=warps, **overlap_options(x.device),
    )  # fmt: skip


def routed_up_triton(x: torch.Tensor, w1: torch.Tensor, buffers: DecodeMoeBuffers, *, rows: int = 2, block: int = 2048, warps: int = 4) -> None:
    """As :func:`routed_up_eager` into ``buffers.routed``."""
    _, twice, hidden = w1.shape
    width, block = twice // 2, min(block, next_power_of_2(hidden))
    _routed_up[(triton.cdiv(width, rows), buffers.ids.shape[0])](
        x, buffers.ids, w1, buffers.routed, width, w1.stride(0), w1.stride(1),
        hidden=hidden, EVEN=hidden % block == 0 and width % rows == 0, R=rows, BLOCK=block, num_warps=warps, **overlap_options(x.device),
    )  # fmt: skip


def all_down_triton(
    w2: torch.Tensor, shared_down: torch.Tensor, buffers: DecodeMoeBuffers, out: torch.Tensor, *, rows: int = 2, block: int = 256, warps: int = 1
) -> None:
    """As :func:`all_down_eager` into ``out [H]``."""
    _, hidden, width = w2.shape
    shared_width = shared_down.shape[1]
    block = min(block, next_power_of_2(width))
    whole_rows = hidden % rows == 0
    _all_down[(triton.cdiv(hidden, rows),)](
        buffers.routed, buffers.shared, buffers.weights, buffers.ids, w2, shared_down, out, hidden, w2.stride(0), w2.stride(1), shared_down.stride(0),
        width=width, shared_width=shared_width, EVEN=whole_rows and width % block == 0, SHARED_EVEN=whole_rows and shared_width % block == 0,
        K=buffers.ids.shape[0], R=rows, BLOCK=block, num_warps=warps, **overlap_options(w2.device),
    )  # fmt: skip


def one_token_triton(x: torch.Tensor, block: ExpertBlock, shared_down: torch.Tensor, buffers: DecodeMoeBuffers, out: torch.Tensor) -> None:
    """Routed and shared experts of a decode step, once the router has filled ``buffers``."""
    routed_up_triton(x, block.w1, buffers)
    all_down_triton(block.w2, shared_down, buffers, out)
