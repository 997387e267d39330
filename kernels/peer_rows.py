"""All-reduce of many tokens between two ranks through each other's memory, with the residual addition and the RMSNorm that follow it.

Each rank owns a *block* that its peer can write: one flag for every few rows, and two parities of as many rows as one call takes. A program stores some
rows into the peer's block and raises their flags there, to the number of the call; while they are on their way it waits for the flag of the rows it
sent before them, adds what has come to what it sent, and goes on to the residual and the norm. So a link carries each summand once in each direction,
which is also what a ring of two carries, and the sum of one part is hidden behind the transfer of the next.

A rank can be at most one call ahead of its peer, as in :mod:`.peer_reduce`: a call ends only after the peer has begun it, and so has read all of the one
before. A program waits only for rows that the peer's program of the same number sends, and both take theirs in one order: ranks with equally many
programs come through even where not all of them run at once.

The peer that does not come, the limit, the host's word and ``failed`` are those of :mod:`.peer_reduce`. A rank that has failed sends nothing any more: its
rows would overwrite what a late peer still reads.
"""

from __future__ import annotations

import torch

from .peer_reduce import LOOK_NS, Mailboxes, _spin_until
from .triton_support import jit, let_next_start, next_power_of_2, overlap_options, tl, wait_for_previous

RANKS = 2
# Rows of one flag: 16 KB of the release's sizes.
ROWS = 2
WARPS = 8
# As many as a multiprocessor has registers for in bf16; while one waits, the other works.
PROGRAMS_PER_MULTIPROCESSOR = 2
CACHE_LINE = 128


def flag_bytes(capacity: int) -> int:
    """Bytes of the flags of ``capacity`` rows, in front of the rows."""
    return -(-(-(-capacity // ROWS) * 4) // CACHE_LINE) * CACHE_LINE


def row_block_bytes(capacity: int, hidden: int, itemsize: int) -> int:
    return flag_bytes(capacity) + 2 * capacity * hidden * itemsize


def programs_of(device: torch.device) -> int:
    """How many a call of :func:`reduce_rows` has on ``device``; both ranks take the smaller number."""
    return PROGRAMS_PER_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


# One binary for all ranks, limits and numbers of rows: nothing may be compiled or loaded while a peer already waits on the same device.
@jit(do_not_specialize=("rank", "timeout_ns", "rows"))
def _reduce_rows(
    summand, residual, weight, normed, blocks, calls, failed, abort, eps, timeout_ns, rank, rows,
    H: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, CAPACITY: tl.constexpr, FLAG_BYTES: tl.constexpr, WAYS: tl.constexpr,
    LOOK_NS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    program, programs = tl.program_id(0), tl.num_programs(0)
    call = tl.load(calls + program) + 1
    way = tl.zeros([WAYS], tl.int32)
    wide = tl.zeros([WAYS], tl.int64)
    # Each thread looks for itself, at its own time, and all of a program must go the same way: hence a minimum over as many values as there are threads.
    # Once the peer has stayed away, nobody waits or sends again: a step has many reductions and several steps may be under way.
    well = tl.min((tl.load(failed + way) == 0).to(tl.int32), axis=0)
    limit = wide + timeout_ns
    kind = summand.dtype.element_ty
    theirs = tl.multiple_of(tl.load(blocks + 1 - rank), 128)
    own = tl.multiple_of(tl.load(blocks + rank), 128)
    half = (call % 2).to(tl.int64) * CAPACITY * H
    sent = tl.multiple_of((theirs + FLAG_BYTES).to(tl.pointer_type(kind)), 16) + tl.multiple_of(half, 16)
    received = tl.multiple_of((own + FLAG_BYTES).to(tl.pointer_type(kind)), 16) + tl.multiple_of(half, 16)
    line = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    gain = tl.load(weight + column, mask=column < H, other=0.0).to(tl.float32)
    count = tl.cdiv(rows, ROWS)
    mine = tl.zeros([ROWS, BLOCK], kind)
    for part in range(program, count + programs, programs):
        before = mine
        if part < count:
            row = part * ROWS + line
            place = row.to(tl.int64) * H + column
            inside = (row < rows) & (column < H)
            mine = tl.load(summand + place, mask=inside, other=0.0)
            tl.store(sent + place, mine, mask=inside & (well != 0))
            tl.debug_barrier()
            tl.atomic_xchg(theirs.to(tl.pointer_type(tl.int32)) + part, call, mask=well != 0, sem="release", scope="sys")
        last = part - programs
        if last >= 0:
            row = last * ROWS + line
            place = row.to(tl.int64) * H + column
            inside = (row < rows) & (column < H)
            stream = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
            flag = wide + own + last.to(tl.int64) * 4
            reached = tl.min(_spin_until(flag, way + call, limit * well, wide + abort.to(tl.int64), wide + LOOK_NS), axis=0)
            tl.debug_barrier()
            if reached == 0:
                tl.store(failed, 1)
            well = well * reached
            total = before.to(tl.float32) + tl.load(received + place, mask=inside, other=0.0, volatile=True).to(tl.float32)
            # As after any other reduction: the sum is rounded, then added.
            total = total.to(kind).to(tl.float32) + stream
            kept = total.to(residual.dtype.element_ty)
            tl.store(residual + place, kept, mask=inside)
            exact = kept.to(tl.float32)
            scale = tl.rsqrt(tl.sum(exact * exact, axis=1) / H + eps)
            scaled = (exact * scale[:, None]).to(normed.dtype.element_ty).to(tl.float32)
            tl.store(normed + place, scaled * gain, mask=inside)
    tl.store(calls + program, call)


def reduce_rows(
    boxes: Mailboxes, summand: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, normed: torch.Tensor, *, capacity: int,
    timeout_s: float,
) -> None:  # fmt: skip
    """As :func:`.peer_reduce.reduce_residual_norm_eager` over both ranks' ``summand [T, H]``; ``residual [T, H]`` is updated in place. All contiguous.

    ``boxes``: ``addresses`` of two blocks of :func:`row_block_bytes` with ``capacity`` rows, and ``calls`` with a place for each program. More rows are
    several calls. A peer that does not come leaves a 1 in ``boxes.failed`` and a wrong sum, as in :func:`.peer_reduce.reduce_residual_norm`.
    """
    count, hidden = residual.shape
    assert capacity * hidden % 16 == 0, "the second parity begins where vectors of 16 bytes do"
    for first in range(0, count, capacity):
        part = slice(first, min(first + capacity, count))
        _reduce_rows[(boxes.calls.numel(),)](
            summand[part], residual[part], weight, normed[part], boxes.addresses, boxes.calls, boxes.failed, boxes.abort, eps,
            int(timeout_s * 1e9), boxes.rank, part.stop - part.start,
            H=hidden, BLOCK=next_power_of_2(hidden), ROWS=ROWS, CAPACITY=capacity, FLAG_BYTES=flag_bytes(capacity), WAYS=32 * WARPS,
            LOOK_NS=LOOK_NS, num_warps=WARPS, **overlap_options(summand.device),
        )  # fmt: skip
