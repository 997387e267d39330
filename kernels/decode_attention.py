"""One token's attention: RoPE, per-head norm, append to the KV cache, split-KV attention; the length is read on the device.

Letters: G KV heads, g query heads per KV head, d head dim, L position of the token (so it sees L + 1 keys), S splits.
"""

from __future__ import annotations

import torch

from .attention import attend_eager
from .attention_runs import plan_runs
from .rope_norm import rope_norm_eager
from .triton_support import jit, let_next_start, next_power_of_2, overlap_options, tl, wait_for_previous

SPLITS = 64
# Keys that one step of a split reads.
BLOCK_KEYS = 64
# Parts that one step of the last program's sum reads.
COMBINE_PARTS = 32
WARPS = 4


def decode_attention_eager(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    query_norm: torch.Tensor,
    key_norm: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    position: int,
    eps: float,
) -> torch.Tensor:
    """``qkv [G, g+2, d]``; ``cos, sin [d]`` fp32 of this position; caches ``[capacity, G, d]`` are written at ``position``. -> ``[G·g, d]``."""
    g = qkv.shape[1] - 2
    rows = qkv.unsqueeze(0)
    q = rope_norm_eager(rows[:, :, :g].flatten(1, 2), cos.unsqueeze(0), sin.unsqueeze(0), query_norm, eps)
    k_cache[position] = rope_norm_eager(rows[:, :, g], cos.unsqueeze(0), sin.unsqueeze(0), key_norm, eps)[0]
    v_cache[position] = qkv[:, g + 1]
    return attend_eager(q, k_cache, v_cache, plan_runs(position, position + 1, ()))[0]


@jit
def _rope_norm(base, column, inside, cos, sin, norm, eps, D: tl.constexpr):
    """Heads in the rows of ``base + column``: rotated by the tables' row, normed, weighted; fp32."""
    first_half = column < D // 2
    partner = tl.where(first_half, column + D // 2, column - D // 2)
    value = tl.load(base + column, mask=inside, other=0.0).to(tl.float32)
    turned = tl.load(base + partner, mask=inside, other=0.0).to(tl.float32)
    rotated = value * cos + tl.where(first_half, -turned, turned) * sin
    scale = tl.rsqrt(tl.sum(rotated * rotated, axis=1, keep_dims=True) / D + eps)
    return rotated * scale * norm


@jit
def _decode_attention(
    qkv, cos_table, sin_table, query_norm, key_norm, k_cache, v_cache, position, out, part_out, part_max, part_sum, arrived,
    eps, scale, key_stride, g: tl.constexpr, PAD_G: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, STEP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    head, split = tl.program_id(0), tl.program_id(1)
    # The position and the keys before it are older than the kernel before this one, which only makes q, k and v.
    at = tl.load(position)
    # Equal parts of whole blocks; splits behind the last part have nothing to do.
    chunk = tl.cdiv(tl.cdiv(at + 1, SPLITS), BLOCK) * BLOCK
    parts = tl.cdiv(at + 1, chunk)
    if split < parts:
        kind = k_cache.dtype.element_ty
        column, row = tl.arange(0, PAD)[None, :], tl.arange(0, ROWS)
        real = column < D
        first = split * chunk
        last = tl.minimum(first + chunk, at)  # keys in the cache; the token's own key comes from registers
        key = first + tl.arange(0, BLOCK)[:, None]
        offset = key.to(tl.int64) * key_stride + head * D + column
        k = tl.load(k_cache + offset, mask=(key < last) & real, other=0.0)
        v = tl.load(v_cache + offset, mask=(key < last) & real, other=0.0)
        rope = at.to(tl.int64) * D + column
        cos, sin = tl.load(cos_table + rope, mask=real, other=0.0), tl.load(sin_table + rope, mask=real, other=0.0)
        q_weight = tl.load(query_norm + column, mask=real, other=0.0).to(tl.float32)
        k_weight = tl.load(key_norm + column, mask=real, other=0.0).to(tl.float32)
        wait_for_previous(OVERLAP)
        group = qkv + head * (g + 2) * D
        q = _rope_norm(group + row[:, None] * D, column, (row < g)[:, None] & real, cos, sin, q_weight, eps, D).to(kind)
        best = tl.full([ROWS], float("-inf"), tl.float32)
        weight = tl.zeros([ROWS], tl.float32)
        total = tl.zeros([ROWS, PAD], tl.float32)
        for start in range(first, last, BLOCK):
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            score = tl.where((start + tl.arange(0, BLOCK) < last)[None, :], score, float("-inf"))
            higher = tl.maximum(best, tl.max(score, axis=1))
            shrink = tl.exp(best - higher)
            p = tl.exp(score - higher[:, None])
            weight = weight * shrink + tl.sum(p, axis=1)
            total = total * shrink[:, None] + tl.dot(p.to(kind), v, input_precision="ieee")
            best = higher
            key += BLOCK
            offset += BLOCK * key_stride
            k = tl.load(k_cache + offset, mask=(key < last) & real, other=0.0)
            v = tl.load(v_cache + offset, mask=(key < last) & real, other=0.0)
        if split == parts - 1:
            own = group + g * D
            new_k = _rope_norm(own, column, real, cos, sin, k_weight, eps, D).to(kind)
            new_v = tl.load(own + D + column, mask=real, other=0.0).to(kind)
            place = at.to(tl.int64) * key_stride + head * D + column
            tl.store(k_cache + place, new_k, mask=real)
            tl.store(v_cache + place, new_v, mask=real)
            own_score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), axis=1) * scale
            highest = tl.maximum(best, own_score)
            old, new = tl.exp(best - highest), tl.exp(own_score - highest)
            weight = weight * old + new
            total = total * old[:, None] + new[:, None] * new_v.to(tl.float32)
            best = highest
        slot = (head * SPLITS + split) * ROWS + row
        tl.store(part_max + slot, best, mask=row < g)
        tl.store(part_sum + slot, weight, mask=row < g)
        tl.store(part_out + slot[:, None] * D + column, total, mask=(row < g)[:, None] & real)
        # Every thread's stores come before the count; whoever counts last sees all of them.
        tl.debug_barrier()
        if tl.atomic_add(arrived + head, 1, sem="acq_rel", scope="gpu") == parts - 1:
            tl.debug_barrier()
            _combine(part_out, part_max, part_sum, out, head, parts, g, PAD_G, D, PAD, ROWS, SPLITS, STEP)
            tl.store(arrived + head, 0)


@jit
def _combine(
    part_out, part_max, part_sum, out, head, parts,
    g: tl.constexpr, PAD_G: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Adds the parts of one KV head; the order of the sum depends on their number alone, so equal inputs give equal bits."""
    part, row, column = tl.arange(0, SPLITS)[:, None], tl.arange(0, PAD_G), tl.arange(0, PAD)
    slot = (head * SPLITS + part) * ROWS + row[None, :]
    there = (part < parts) & (row < g)[None, :]
    best = tl.load(part_max + slot, mask=there, other=float("-inf"), volatile=True)
    share = tl.load(part_sum + slot, mask=there, other=0.0, volatile=True)
    # Rows that only fill up have no part: their highest score is 0, so that nothing becomes NaN.
    highest = tl.where(row < g, tl.max(best, axis=0), 0.0)
    weight = tl.sum(tl.exp(best - highest[None, :]) * share, axis=0)
    total = tl.zeros([PAD_G, PAD], tl.float32)
    # All heads of the group at once, a few parts at a time: one wait for memory a step.
    for first in range(0, parts, STEP):
        some = first + tl.arange(0, STEP)[:, None]
        some_slot = (head * SPLITS + some) * ROWS + row[None, :]
        real = (some < parts) & (row < g)[None, :]
        grow = tl.exp(tl.load(part_max + some_slot, mask=real, other=float("-inf"), volatile=True) - highest[None, :])
        inside = real[:, :, None] & (column < D)[None, None, :]
        value = tl.load(part_out + some_slot[:, :, None] * D + column[None, None, :], mask=inside, other=0.0, volatile=True)
        total += tl.sum(value * grow[:, :, None], axis=0)
    at = out + (head * g + row[:, None]) * D + column[None, :]
    tl.store(at, total / tl.where(row < g, weight, 1.0)[:, None], mask=(row < g)[:, None] & (column < D)[None, :])


class DecodeAttention:
    """The kernel with its scratch memory, made once for a model's sizes on one device and used by every layer in turn."""

    def __init__(self, kv_heads: int, query_group: int, head_dim: int, device: torch.device):
        if head_dim % 2:
            raise ValueError(f"rotary embedding turns pairs, so the head dim must be even, not {head_dim}")
        # At least what a matrix unit takes.
        self._rows = max(16, next_power_of_2(query_group))
        self._pad = max(16, next_power_of_2(head_dim))
        shape = (kv_heads, SPLITS, self._rows)
        self._group = query_group
        self._part_out = torch.empty(*shape, head_dim, device=device)
        self._part_max = torch.empty(shape, device=device)
        self._part_sum = torch.empty(shape, device=device)
        self._arrived = torch.zeros(kv_heads, dtype=torch.int32, device=device)

    def __call__(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        query_norm: torch.Tensor,
        key_norm: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        position: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        """As :func:`decode_attention_eager` with whole tables ``cos, sin [positions, d]`` and ``position`` int32 ``[1]`` on the device."""
        kv_heads, head_dim = k_cache.shape[1:]
        _decode_attention[(kv_heads, SPLITS)](
            qkv, cos, sin, query_norm, key_norm, k_cache, v_cache, position, out, self._part_out, self._part_max, self._part_sum, self._arrived,
            eps, head_dim**-0.5, k_cache.stride(0), g=self._group, PAD_G=next_power_of_2(self._group), D=head_dim, PAD=self._pad, ROWS=self._rows,
            BLOCK=BLOCK_KEYS, SPLITS=SPLITS, STEP=min(SPLITS, COMBINE_PARTS), num_warps=WARPS, **overlap_options(qkv.device),
        )  # fmt: skip
