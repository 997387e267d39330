"""Attention without a mask of the whole sequence: a list of runs, each causal or full.

Rows of a run attend to the first ``k_stop`` keys; in a causal run the last row does and each earlier row sees one key less. Text and special
tokens form causal runs, images form full runs, so memory is linear in the number of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

# Rows of a causal run that share one explicit mask; bounds the mask to CAUSAL_ROWS x keys.
CAUSAL_ROWS = 512


@dataclass(frozen=True)
class AttentionRun:
    """Query rows ``[q_start, q_stop)`` of a block; ``k_stop`` keys for the last of them."""

    q_start: int
    q_stop: int
    k_stop: int
    causal: bool


def plan_runs(start: int, stop: int, full_slices: Sequence[tuple[int, int]]) -> tuple[AttentionRun, ...]:
    """Runs for the absolute positions ``[start, stop)`` of a row: causal, and bidirectional inside each full slice (spec 3.4).

    Query rows count from ``start``. A full slice must not be cut by ``start`` or ``stop``.
    """
    runs = []
    at = start
    for first, last in sorted(full_slices):
        if last <= start or first >= stop:
            continue
        if first < start or last > stop:
            raise ValueError(f"positions {start}…{stop} cut the bidirectional slice {first}…{last}; an image must be computed whole")
        if first > at:
            runs.append(AttentionRun(at - start, first - start, first, causal=True))
        runs.append(AttentionRun(first - start, last - start, last, causal=False))
        at = last
    if at < stop:
        runs.append(AttentionRun(at - start, stop - start, stop, causal=True))
    return tuple(runs)


def clip_runs(runs: Sequence[AttentionRun], first: int, last: int) -> tuple[AttentionRun, ...]:
    """The part of ``runs`` whose query rows lie in ``[first, last)``, with rows counted from ``first`` (sequence-parallel ranks)."""
    clipped = []
    for run in runs:
        begin, end = max(run.q_start, first), min(run.q_stop, last)
        if begin < end:
            k_stop = run.k_stop - (run.q_stop - end) if run.causal else run.k_stop
            clipped.append(AttentionRun(begin - first, end - first, k_stop, run.causal))
    return tuple(clipped)


def attend_eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runs: Sequence[AttentionRun]) -> torch.Tensor:
    """``q [T, heads, d]``, ``k, v [K, kv_heads, d]`` -> ``[T, heads, d]``; scale 1/√d; query head i uses KV head i // (heads/kv_heads).

    Rows that no run covers stay zero.
    """
    out = torch.zeros_like(q)
    for run in runs:
        if run.causal and run.q_stop - run.q_start > 1:
            for first in range(run.q_start, run.q_stop, CAUSAL_ROWS):
                part = clip_runs([run], first, min(first + CAUSAL_ROWS, run.q_stop))[0]
                _attend_rows(out, q, k, v, first, first + part.q_stop, part.k_stop, causal=True)
        else:
            _attend_rows(out, q, k, v, run.q_start, run.q_stop, run.k_stop, causal=False)
    return out


def attend_fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runs: Sequence[AttentionRun]) -> torch.Tensor:
    """As :func:`attend_eager` without a mask tensor: a causal run is aligned with its last key inside the kernel."""
    if len(runs) == 1 and runs[0].q_stop - runs[0].q_start == q.shape[0]:
        return _attend_run(q, k, v, runs[0])
    out = torch.zeros_like(q)
    for run in runs:
        out[run.q_start : run.q_stop] = _attend_run(q[run.q_start : run.q_stop], k, v, run)
    return out


def _attend_run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: AttentionRun) -> torch.Tensor:
    rows = q.shape[0]
    square = rows == run.k_stop
    bias = causal_lower_right(rows, run.k_stop) if run.causal and rows > 1 and not square else None
    result = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k[: run.k_stop].transpose(0, 1).unsqueeze(0),
        v[: run.k_stop].transpose(0, 1).unsqueeze(0),
        attn_mask=bias,
        is_causal=run.causal and rows > 1 and square,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return result.squeeze(0).transpose(0, 1)


def _attend_rows(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, last: int, k_stop: int, *, causal: bool
) -> None:
    rows = last - first
    mask = None
    if causal:
        mask = torch.ones(rows, k_stop, dtype=torch.bool, device=q.device).tril(diagonal=k_stop - rows)
    result = F.scaled_dot_product_attention(
        q[first:last].transpose(0, 1).unsqueeze(0),
        k[:k_stop].transpose(0, 1).unsqueeze(0),
        v[:k_stop].transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    out[first:last] = result.squeeze(0).transpose(0, 1)
