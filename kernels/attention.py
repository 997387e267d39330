"""Attention without a mask of the whole sequence: a list of runs, each causal or full.

Rows of a run attend to the first ``k_stop`` keys; in a causal run the last row does and each earlier row sees one key less. Text and special
tokens form causal runs, images form full runs, so memory is linear in the number of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from .attention_runs import AttentionRun, clip_runs
from .prefill_attention import attend_rows_triton
from .triton_support import why_not

# Rows of a causal run that share one explicit mask; bounds the mask to CAUSAL_ROWS x keys.
CAUSAL_ROWS = 512


def attend_eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runs: Sequence[AttentionRun], out: torch.Tensor | None = None
) -> torch.Tensor:
    """``q [T, heads, d]``, ``k, v [K, kv_heads, d]`` -> ``[T, heads, d]``, in ``out`` where it is given; scale 1/√d; query head i uses KV head
    i // (heads/kv_heads).

    Rows that no run covers are zero.
    """
    out = torch.zeros_like(q) if out is None else out.zero_()
    for run in runs:
        if run.causal and run.q_stop - run.q_start > 1:
            for first in range(run.q_start, run.q_stop, CAUSAL_ROWS):
                part = clip_runs([run], first, min(first + CAUSAL_ROWS, run.q_stop))[0]
                _attend_rows(out, q, k, v, first, first + part.q_stop, part.k_stop, causal=True)
        else:
            _attend_rows(out, q, k, v, run.q_start, run.q_stop, run.k_stop, causal=False)
    return out


def attend_fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runs: Sequence[AttentionRun], out: torch.Tensor | None = None
) -> torch.Tensor:
    """As :func:`attend_eager` without a mask tensor: a causal run is aligned with its last key inside the kernel. Tokens of ``out`` have contiguous
    heads."""
    if out is None and len(runs) == 1 and runs[0].q_stop - runs[0].q_start == q.shape[0] and not takes_rows(runs[0], q):
        return _attend_run(q, k, v, runs[0])
    if out is None:
        out = torch.empty_like(q)
    if sum(run.q_stop - run.q_start for run in runs) != q.shape[0]:
        out.zero_()
    for ours, part in groupby(runs, lambda run: takes_rows(run, q)):
        if ours:
            attend_rows_triton(q, k, v, tuple(part), out)
        else:
            for run in part:
                out[run.q_start : run.q_stop] = _attend_run(q[run.q_start : run.q_stop], k, v, run)
    return out


def takes_rows(run: AttentionRun, q: torch.Tensor) -> bool:
    """Whether our own kernel computes a run: text behind a prefix, for which the library's kernels have no causal form that fills the device. Text from
    the start and pictures are what those are best at; fp32 and other head dims are theirs alone."""
    known = q.dtype in (torch.bfloat16, torch.float16) and q.shape[2] in (64, 128)
    return known and run.causal and run.q_stop - run.q_start < run.k_stop and why_not(q.device) is None


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


def _attend_rows(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, last: int, k_stop: int, *, causal: bool) -> None:
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
