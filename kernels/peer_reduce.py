"""One-shot all-reduce of one token's vector through peers' memory, with the residual addition and the RMSNorm that follow it.

Each rank owns a *mailbox* that its peers can write: two parities of ``[ranks, H]`` summands and one counter per peer. A call writes this rank's
summand into its row of every mailbox, raises its counter there, waits until all counters of the own mailbox have reached the number of the call, and adds the
rows in the order of the ranks, in fp32. All ranks add the same numbers in the same order, so they hold the same bits.

A rank can be at most one call ahead of a peer: call n+1 ends only after every peer has begun n+1, and so has read all of n. Two parities suffice.

A peer that has failed never comes. Its ranks' hosts learn of it in other ways and set a word in their own memory, which a kernel looks at only once it
has waited for long: reading it costs a trip over PCIe.

One program does everything, because the norm needs the whole row: 8 KB is less than what one multiprocessor moves while a second launch would start.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .residual_norm import residual_norm_eager
from .triton_support import jit, let_next_start, next_power_of_2, overlap_options, tl, wait_for_previous

# 32-bit words in front of the summands: counters of the peers (16 ranks at most) and padding to a cache line.
HEADER_WORDS = 32
MAXIMUM_RANKS = 16
# A reduction of healthy ranks takes microseconds.
LOOK_NS = 1_000_000


def reduce_residual_norm_eager(
    summands: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``summands [ranks, ..., H]`` in rank order -> (residual + their fp32 sum, RMSNorm of it)."""
    total = summands[0].float()
    for summand in summands[1:]:
        total = total + summand.float()
    return residual_norm_eager(total.to(residual.dtype), residual, weight, eps)


def mailbox_bytes(ranks: int, hidden: int, itemsize: int) -> int:
    return HEADER_WORDS * 4 + 2 * ranks * hidden * itemsize


@jit
def _spin_until(address, target, timeout_ns, abort, look_ns):
    """Waits until the counter at each address has reached ``target``; 0 where it has not within the time, or before the word at ``abort`` was set.

    The word is looked at every ``look_ns``.
    """
    return tl.inline_asm_elementwise(
        """
        {
            .reg .pred %reached, %late, %early, %alone;
            .reg .b32 %value, %ahead;
            .reg .b64 %start, %now, %passed, %look;
            mov.u64 %start, %globaltimer;
            mov.u64 %look, $5;
        again:
            ld.global.acquire.sys.b32 %value, [$1];
            sub.s32 %ahead, %value, $2;
            setp.ge.s32 %reached, %ahead, 0;
            @%reached bra done;
            mov.u64 %now, %globaltimer;
            sub.u64 %passed, %now, %start;
            setp.gt.u64 %late, %passed, $3;
            @%late bra done;
            setp.lt.u64 %early, %passed, %look;
            @%early bra again;
            add.u64 %look, %passed, $5;
            ld.global.relaxed.sys.b32 %value, [$4];
            setp.ne.s32 %alone, %value, 0;
            @!%alone bra again;
        done:
            selp.b32 $0, 1, 0, %reached;
        }
        """,
        "=r,l,r,l,l,l",
        [address, target, timeout_ns, abort, look_ns],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def meet(boxes, rank, call, patience_ns, abort, RANKS: tl.constexpr, PAD: tl.constexpr, LOOK_NS: tl.constexpr):
    """Tells all ranks that this one has reached ``call``, and waits until all have; 0 when one stayed away. Each of ``boxes``, addresses of all ranks'
    memory, begins with a counter for each rank. What this program stored before is seen by whoever met it."""
    tl.debug_barrier()
    place = tl.arange(0, PAD)
    peer = tl.where(place < RANKS, place, 0)
    counters = (tl.load(boxes + peer) + rank * 4).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(counters, tl.zeros([PAD], tl.int32) + call, mask=place < RANKS, sem="release", scope="sys")
    own = tl.load(boxes + rank)
    wide_zero = tl.zeros([PAD], tl.int64)
    reached = _spin_until(
        own + peer.to(tl.int64) * 4, tl.zeros([PAD], tl.int32) + call, wide_zero + patience_ns, wide_zero + abort.to(tl.int64), wide_zero + LOOK_NS
    )
    tl.debug_barrier()
    return tl.min(reached, axis=0)


# One binary for all ranks and timeouts: nothing may be compiled or loaded while a peer already waits on the same device.
@jit(do_not_specialize=("rank", "timeout_ns"))
def _reduce_residual_norm(
    summand, residual, weight, normed, mailboxes, calls, failed, abort, eps, timeout_ns, rank,
    RANKS: tl.constexpr, PAD: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, HEADER: tl.constexpr, LOOK_NS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    call = tl.load(calls) + 1
    # Once a peer has stayed away, nobody waits again: a step has many reductions and several steps may be under way.
    patience = tl.where(tl.load(failed) != 0, 0, timeout_ns)
    parity = call % 2
    column = tl.arange(0, BLOCK)
    inside = column < H
    mine = tl.load(summand + column, mask=inside, other=0.0)
    kind = summand.dtype.element_ty
    for step in tl.static_range(RANKS):
        # Starts with the next rank, so that the ranks do not all write to the same one at once.
        peer = (rank + 1 + step) % RANKS
        theirs = (tl.load(mailboxes + peer) + HEADER * 4).to(tl.pointer_type(kind))
        tl.store(theirs + (parity * RANKS + rank) * H + column, mine, mask=inside)
    if meet(mailboxes, rank, call, patience, abort, RANKS, PAD, LOOK_NS) == 0:
        tl.store(failed, 1)
    own = tl.load(mailboxes + rank)
    rows = (own + HEADER * 4).to(tl.pointer_type(kind)) + parity * RANKS * H + column
    total = tl.zeros([BLOCK], tl.float32)
    for source in tl.static_range(RANKS):
        total += tl.load(rows + source * H, mask=inside, other=0.0, volatile=True).to(tl.float32)
    # As after any other reduction: the sum is rounded, then added.
    total = total.to(kind).to(tl.float32) + tl.load(residual + column, mask=inside, other=0.0).to(tl.float32)
    kept = total.to(residual.dtype.element_ty)
    tl.store(residual + column, kept, mask=inside)
    wide = kept.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / H + eps)
    scaled = (wide * scale).to(normed.dtype.element_ty).to(tl.float32)
    tl.store(normed + column, scaled * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32), mask=inside)
    tl.store(calls, call)


@dataclass(frozen=True)
class Mailboxes:
    """What :func:`reduce_residual_norm` needs of this rank. ``addresses`` int64 ``[ranks]``: every rank's mailbox as this process sees it, in
    logical rank order. ``calls`` and ``failed`` int32 ``[1]`` of this rank alone. ``abort`` int32 ``[1]`` in host memory that the device can read."""

    addresses: torch.Tensor
    rank: int
    calls: torch.Tensor
    failed: torch.Tensor
    abort: torch.Tensor


def reduce_residual_norm(
    boxes: Mailboxes, summand: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, normed: torch.Tensor, *, timeout_s: float
) -> None:
    """As :func:`reduce_residual_norm_eager` over all ranks' ``summand [H]``; ``residual`` is updated in place.

    A peer that does not come within ``timeout_s``, or before the host sets ``boxes.abort``, leaves a 1 in ``boxes.failed`` and a wrong sum; the caller
    must look before it uses the result.
    """
    ranks, hidden = boxes.addresses.shape[0], summand.shape[-1]
    _reduce_residual_norm[(1,)](
        summand, residual, weight, normed, boxes.addresses, boxes.calls, boxes.failed, boxes.abort, eps,
        int(timeout_s * 1e9), boxes.rank,
        RANKS=ranks, PAD=next_power_of_2(ranks), H=hidden, BLOCK=next_power_of_2(hidden), HEADER=HEADER_WORDS,
        LOOK_NS=LOOK_NS, num_warps=16 if hidden >= 4096 else 4, **overlap_options(summand.device),
    )  # fmt: skip
