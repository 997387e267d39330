"""Which program of the attention kernel computes what: tiles of query rows over their keys, cut so that all programs have the same work.

A tile costs as many blocks of keys as its last row sees. All tiles of all KV heads form one line of blocks, cut into equal shares. A tile with a cut inside
has several parts, whose sums are put together afterwards, in order. The line depends on the runs and on the device's size alone, so every rank cuts alike.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate

import torch

from .attention_runs import AttentionRun

# A program with fewer blocks of keys would spend its time on loading queries and storing parts.
MIN_BLOCKS = 4
WHOLE = -1


@dataclass(frozen=True)
class Schedule:
    """Int32 tensors. ``limits [T]``: keys that a row sees. Program p does the segments ``ranges[p] … ranges[p+1]`` of ``segments [n, 4]``: unit
    (tile · G + KV head), first key, last key (exclusive), place of the part or WHOLE. ``splits [m, 3]``: unit, first part, parts."""

    limits: torch.Tensor
    ranges: torch.Tensor
    segments: torch.Tensor
    splits: torch.Tensor
    parts: int


def row_limits(runs: Sequence[AttentionRun]) -> torch.Tensor:
    """Keys that each row sees, int32, rows counted from the first run's; the runs follow each other without a gap."""
    spans = []
    for run in runs:
        rows = run.q_stop - run.q_start
        last = torch.full((rows,), run.k_stop, dtype=torch.int32)
        spans.append(last - torch.arange(rows - 1, -1, -1, dtype=torch.int32) if run.causal else last)
    return torch.cat(spans)


def cut(blocks: Sequence[int], groups: int, programs: int, keys: int, longest: Sequence[int]) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """``blocks[tile]`` of ``keys`` keys -> ranges, segments, splits as in :class:`Schedule`. Long tiles are the last ones and go first."""
    units = [tile * groups + group for tile in reversed(range(len(blocks))) for group in range(groups)]
    total = groups * sum(blocks)
    programs = max(1, min(programs, total // MIN_BLOCKS))
    ends = [total * (program + 1) // programs for program in range(programs)]
    ranges, segments, splits = [0], [], []
    parts = at = program = 0
    for unit in units:
        tile, first = unit // groups, 0
        pieces = []
        while first < blocks[tile]:
            taken = min(blocks[tile] - first, ends[program] - at)
            pieces.append([unit, first * keys, min((first + taken) * keys, longest[tile]), WHOLE])
            segments.append(pieces[-1])
            first, at = first + taken, at + taken
            if at == ends[program]:
                ranges.append(len(segments))
                program += 1
        if len(pieces) > 1:
            splits.append([unit, parts, len(pieces)])
            for piece in pieces:
                piece[3], parts = parts, parts + 1
    return ranges, segments, splits


_handed_out: ContextVar[list[Schedule] | None] = ContextVar("handed_out", default=None)


@contextmanager
def collect_schedules() -> Iterator[list[Schedule]]:
    """All schedules that are handed out inside, for a CUDA graph that is recorded there: it reads their tensors and does not keep them alive."""
    found: list[Schedule] = []
    token = _handed_out.set(found)
    try:
        yield found
    finally:
        _handed_out.reset(token)


def plan_schedule(
    runs: tuple[AttentionRun, ...], group: int, groups: int, rows: int, keys: int, programs: int, device: torch.device
) -> Schedule:
    """For tiles of ``rows`` rows (tokens · ``group``) and ``keys`` keys. Kept, because all layers and steps ask for the same."""
    schedule = _make_schedule(runs, group, groups, rows, keys, programs, device)
    found = _handed_out.get()
    if found is not None:
        found.append(schedule)
    return schedule


@functools.lru_cache(maxsize=32)
def _make_schedule(runs: tuple[AttentionRun, ...], group: int, groups: int, rows: int, keys: int, programs: int, device: torch.device) -> Schedule:
    limits = row_limits(runs)
    wide = limits.repeat_interleave(group)
    padded = torch.nn.functional.pad(wide, (0, -len(wide) % rows))
    longest = padded.view(-1, rows).amax(1).tolist()
    ranges, segments, splits = cut([-(-stop // keys) for stop in longest], groups, programs, keys, longest)
    sizes = list(accumulate((len(limits), len(ranges), 4 * len(segments), 3 * len(splits))))
    table = torch.cat([limits, *(torch.tensor(part, dtype=torch.int32).flatten() for part in (ranges, segments, splits))]).to(device)
    bounds = zip((0, *sizes), sizes, strict=False)
    limits, ranges, segments, splits = (table[first:last] for first, last in bounds)
    return Schedule(limits, ranges, segments.view(-1, 4), splits.view(-1, 3), sum(part[2] for part in splits.view(-1, 3).tolist()))
