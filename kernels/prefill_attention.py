"""Attention of many query rows over long keys in one launch: each row sees a number of keys of its own, so any list of runs is one call.

The g query heads of a KV head lie beside each other in the rows of a tile, so they share every key and value that is read, and a tile of few tokens is
still full. A fixed number of programs share the work (:mod:`.row_schedule`); a second launch puts together the tiles that several of them worked on.

Letters: T query tokens, G KV heads, g query heads per KV head, d head dim.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from .attention_runs import AttentionRun
from .row_schedule import plan_schedule
from .triton_support import jit, tl

JOIN_ROWS = 16


@dataclass(frozen=True)
class AttentionTile:
    """Rows (tokens · g) and keys of a tile, warps, stages of the pipeline, programs that a multiprocessor holds."""

    rows: int
    keys: int
    warps: int
    stages: int
    resident: int


def choose_tile(rows: int, itemsize: int) -> AttentionTile:
    """``rows`` = tokens · g of one KV head."""
    if itemsize > 2:
        return AttentionTile(16, 32, 4, 1, 1)  # fp32 is for checks
    if rows <= 16:
        return AttentionTile(16, 64, 4, 3, 2)
    return AttentionTile(64, 64, 4, 2, 2) if rows <= 128 else AttentionTile(128, 64, 8, 3, 1)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@jit
def _attend_rows(
    q, k, v, out, part_out, part_log, limits, ranges, segments, rows, groups, scale, q_row, k_row, k_head, v_row, v_head, out_row,
    g: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    column, key = tl.arange(0, D), tl.arange(0, KEYS)
    # One pointer moves over the keys; the offsets of a tile stay, in 32 bits, which spares registers.
    k_offset = key[:, None] * k_row + column[None, :]
    v_offset = key[:, None] * v_row + column[None, :]
    for index in range(tl.load(ranges + tl.program_id(0)), tl.load(ranges + tl.program_id(0) + 1)):
        unit, first = tl.load(segments + index * 4), tl.load(segments + index * 4 + 1)
        stop, place = tl.load(segments + index * 4 + 2), tl.load(segments + index * 4 + 3)
        group = unit % groups
        inner = tl.arange(0, ROWS)
        row = unit // groups * ROWS + inner
        token, head = row // g, group * g + row % g
        here = row < rows
        limit = tl.load(limits + token, mask=here, other=0)
        query = tl.load(q + token.to(tl.int64)[:, None] * q_row + (head * D)[:, None] + column[None, :], mask=here[:, None], other=0.0)
        # Rows behind the last token have no say in how far no mask is needed.
        shortest = tl.min(tl.where(here, limit, stop), axis=0)
        free = tl.maximum(tl.minimum(shortest, stop) // KEYS * KEYS, first)
        k_at = k + group * k_head + first.to(tl.int64) * k_row
        v_at = v + group * v_head + first.to(tl.int64) * v_row
        total = tl.zeros([ROWS, D], tl.float32)
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        weight = tl.zeros([ROWS], tl.float32)
        for _ in range(first, free, KEYS):
            score = tl.dot(query, tl.trans(tl.load(k_at + k_offset)), input_precision="ieee")
            now = tl.maximum(highest, tl.max(score, axis=1) * scale)
            shrink = tl.exp2(highest - now)
            p = tl.exp2(score * scale - now[:, None])
            weight = weight * shrink + tl.sum(p, axis=1)
            total = tl.dot(p.to(v.dtype.element_ty), tl.load(v_at + v_offset), total * shrink[:, None], input_precision="ieee")
            highest = now
            k_at += KEYS * k_row.to(tl.int64)
            v_at += KEYS * v_row.to(tl.int64)
        for start in range(free, stop, KEYS):
            inside = (start + key < stop)[:, None]
            score = tl.dot(query, tl.trans(tl.load(k_at + k_offset, mask=inside, other=0.0)), input_precision="ieee") * scale
            score = tl.where(start + key[None, :] < limit[:, None], score, float("-inf"))
            now = tl.maximum(highest, tl.max(score, axis=1))
            # A row that has seen no key yet must not subtract infinity from infinity.
            base = tl.where(now == float("-inf"), 0.0, now)
            shrink = tl.exp2(highest - base)
            p = tl.exp2(score - base[:, None])
            weight = weight * shrink + tl.sum(p, axis=1)
            values = tl.load(v_at + v_offset, mask=inside, other=0.0)
            total = tl.dot(p.to(v.dtype.element_ty), values, total * shrink[:, None], input_precision="ieee")
            highest = now
            k_at += KEYS * k_row.to(tl.int64)
            v_at += KEYS * v_row.to(tl.int64)
        weight = tl.where(weight == 0.0, 1.0, weight)
        normed = total / weight[:, None]
        if place < 0:
            to = out + token.to(tl.int64)[:, None] * out_row + (head * D)[:, None] + column[None, :]
            tl.store(to, normed.to(out.dtype.element_ty), mask=here[:, None])
        else:
            at = place * ROWS + inner
            tl.store(part_out + at.to(tl.int64)[:, None] * D + column[None, :], normed)
            tl.store(part_log + at, highest + tl.log2(weight))


@jit
def _join(
    part_out, part_log, out, splits, rows, groups, out_row, g: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, SHARE: tl.constexpr
):  # fmt: skip
    """Parts one after the other, always in this order."""
    unit, first = tl.load(splits + tl.program_id(0) * 3), tl.load(splits + tl.program_id(0) * 3 + 1)
    parts = tl.load(splits + tl.program_id(0) * 3 + 2)
    inner = tl.program_id(1) * SHARE + tl.arange(0, SHARE)
    row = unit // groups * ROWS + inner
    head = unit % groups * g + row % g
    here = row < rows
    column = tl.arange(0, D)
    # The part with the first key is not empty for any row.
    highest = tl.load(part_log + first * ROWS + inner)
    total = tl.load(part_out + (first * ROWS + inner).to(tl.int64)[:, None] * D + column[None, :])
    weight = tl.full([SHARE], 1.0, tl.float32)
    for part in range(first + 1, first + parts):
        log = tl.load(part_log + part * ROWS + inner)
        now = tl.maximum(highest, log)
        shrink, share = tl.exp2(highest - now), tl.exp2(log - now)
        at = (part * ROWS + inner).to(tl.int64)[:, None] * D + column[None, :]
        total = total * shrink[:, None] + share[:, None] * tl.load(part_out + at)
        weight = weight * shrink + share
        highest = now
    to = out + (row // g).to(tl.int64)[:, None] * out_row + (head * D)[:, None] + column[None, :]
    tl.store(to, (total / weight[:, None]).to(out.dtype.element_ty), mask=here[:, None])


def attend_rows_triton(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runs: tuple[AttentionRun, ...], out: torch.Tensor, *, tile: AttentionTile | None = None
) -> None:
    """The rows of ``runs``, which follow each other without a gap, from ``q [T, G·g, d]`` to ``out [T, G·g, d]``; ``k, v [K, G, d]``, d 64 or 128.

    Tokens of ``q`` and ``out`` have contiguous heads; rows and heads of ``k`` and ``v`` may be strided.
    """
    heads, d = q.shape[1:]
    groups = k.shape[1]
    g = heads // groups
    first, last = runs[0].q_start, runs[-1].q_stop
    q, out = q[first:last], out[first:last]
    if any(tensor.stride(2) != 1 for tensor in (q, k, v, out)) or any(tensor.stride(1) != d for tensor in (q, out)):
        raise ValueError("attention needs contiguous heads")
    rows = (last - first) * g
    tile = tile or choose_tile(rows, q.element_size())
    plan = plan_schedule(runs, g, groups, tile.rows, tile.keys, _processors(q.device) * tile.resident, q.device)
    part_out = torch.empty(plan.parts, tile.rows, d, dtype=torch.float32, device=q.device) if plan.parts else out
    part_log = torch.empty(plan.parts, tile.rows, dtype=torch.float32, device=q.device) if plan.parts else out
    scale = d**-0.5 * 1.4426950408889634  # exp2 is what the device has
    _attend_rows[(len(plan.ranges) - 1,)](
        q, k, v, out, part_out, part_log, plan.limits, plan.ranges, plan.segments, rows, groups, scale,
        q.stride(0), k.stride(0), k.stride(1), v.stride(0), v.stride(1), out.stride(0),
        g=g, D=d, ROWS=tile.rows, KEYS=tile.keys, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if plan.parts:
        _join[(len(plan.splits), tile.rows // JOIN_ROWS)](
            part_out, part_log, out, plan.splits, rows, groups, out.stride(0), g=g, D=d, ROWS=tile.rows, SHARE=JOIN_ROWS, num_warps=4
        )
