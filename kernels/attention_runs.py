"""Runs: which keys the rows of a block see. Rows of a run see the first ``k_stop`` keys; in a causal run the last row does and each earlier row one less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
