"""The parallel plan: which rank holds what, and who talks to whom in which phase. Pure arithmetic.

Nothing here needs a process, a device or torch, so every rank of every plan can be tested on one CPU. Words: a *shard* is the part
of the weights that stays resident on a rank (``storage_tp`` of them), a *replica* is one complete set of shards, and a
*micro_shard* is the part of a shard that a rank uses while all ranks work as one tensor-parallel group (prefill and decode of plan
``hybrid``). In plan ``replicated`` each replica reads and writes the text by itself, and all of them write the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .plan_rules import (
    ATTENTION_KINDS,
    DENOISE_KINDS,
    PLAN_NAMES,
    REPLICA_PLANS,
    AttentionKind,
    DenoiseKind,
    PlanError,
    PlanName,
    alternatives,
    check_choice,
    check_denoise,
    check_replicas,
    default_storage_tp,
)
from .topology import PHASES, Phase, Topology

KV_HEADS = "num_key_value_heads"


@dataclass(frozen=True)
class ParallelPlan:
    """N ranks, weights resident in ``storage_tp`` shards, ``replicas`` times. Build it with :func:`make_plan`."""

    name: PlanName
    world_size: int
    storage_tp: int
    denoise: DenoiseKind
    attention: AttentionKind
    rank: int

    @property
    def replicas(self) -> int:
        return self.world_size // self.storage_tp

    @property
    def shard(self) -> int:
        return self.rank % self.storage_tp

    @property
    def replica(self) -> int:
        return self.rank // self.storage_tp

    @property
    def micro_count(self) -> int:
        return self.replicas if self.name == "hybrid" else 1

    @property
    def micro(self) -> int:
        return self.replica if self.name == "hybrid" else 0

    @property
    def ar_tp(self) -> int:
        """Ranks of one tensor-parallel group of prefill and decode."""
        return self.storage_tp * self.micro_count

    @property
    def logical_tp_rank(self) -> int:
        """Place of this rank in its tensor-parallel group of prefill and decode."""
        return self.shard * self.micro_count + self.micro

    @property
    def ar_order(self) -> tuple[int, ...]:
        """That group's physical ranks by logical rank; hybrid on 4 ranks with storage_tp 2: (0, 2, 1, 3)."""
        if self.name == "replicated":
            return self.shard_ranks
        return tuple(sorted(range(self.world_size), key=lambda rank: self.on_rank(rank).logical_tp_rank))

    def on_rank(self, rank: int) -> ParallelPlan:
        if not 0 <= rank < self.world_size:
            raise PlanError(f"rank {rank} is not one of the {self.world_size} ranks of plan {self.name}")
        return replace(self, rank=rank)

    @property
    def replica_ranks(self) -> tuple[int, ...]:
        """Ranks that hold the same shard, by replica."""
        return tuple(range(self.shard, self.world_size, self.storage_tp))

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        """Ranks of this rank's replica, by shard (consecutive)."""
        first = self.replica * self.storage_tp
        return tuple(range(first, first + self.storage_tp))

    @property
    def picture_ranks(self) -> tuple[int, ...]:
        """Ranks that share one picture in the VAE, from its top to its bottom: all of them, in every plan."""
        return tuple(range(self.world_size))

    @property
    def cfg_size(self) -> int:
        return 2 if self.denoise in ("cfg", "cfg_sp") else 1

    @property
    def sp_size(self) -> int:
        return self.replicas // self.cfg_size if self.denoise in ("sp", "cfg_sp") else 1

    @property
    def denoise_kinds(self) -> tuple[DenoiseKind, ...]:
        """All ways to denoise with these weights where they are; the groups of all of them are made together."""
        if self.replicas == 1:
            return ("tp",)
        by_branch: tuple[DenoiseKind, ...] = ("cfg",) if self.replicas == 2 else ("cfg_sp",) if self.replicas % 2 == 0 else ()
        return (*(("tp",) if self.name == "hybrid" else ()), "sp", *by_branch)

    def denoising(self, denoise: DenoiseKind, attention: AttentionKind) -> ParallelPlan:
        """The same weights on the same ranks with another topology of denoise.

        Raises:
            PlanError: this plan has no such topology.
        """
        check_choice("denoise", denoise, DENOISE_KINDS)
        check_choice("attention", attention, ATTENTION_KINDS)
        check_denoise(self.name, denoise, self.replicas)
        return replace(self, denoise=denoise, attention=attention)

    def has_weights_of(self, other: ParallelPlan) -> bool:
        """Whether this rank keeps the same bytes under ``other``, which then differs in how it denoises, or not at all."""
        return replace(self, denoise=other.denoise, attention=other.attention) == other

    def topology(self, phase: Phase) -> Topology:
        """Groups of this rank in ``phase``. Prefill and decode: all ranks in one TP group, each with its own micro shard (``replicated``: each
        replica in its own, with whole shards); so does denoise ``tp`` of plan hybrid."""
        if phase not in PHASES:
            raise PlanError(f"unknown phase {phase!r}; phases are {', '.join(PHASES)}")
        alone = (self.rank,)
        if phase != "denoise" or self.denoises_as_text:
            micro = self.micro if self.micro_count > 1 else None
            return Topology(phase, self.ar_order, self.logical_tp_rank, alone, 0, alone, 0, micro)
        sp = self.sp_size
        branch, sp_rank = divmod(self.replica, sp) if self.cfg_size * sp > 1 else (0, 0)
        peers = self.replica_ranks
        sp_ranks = tuple(peers[branch * sp : branch * sp + sp]) if self.cfg_size * sp > 1 else alone
        cfg_ranks = tuple(peers[c * sp + sp_rank] for c in range(self.cfg_size)) if self.cfg_size > 1 else alone
        return Topology(phase, self.shard_ranks, self.shard, sp_ranks, sp_rank, cfg_ranks, branch, None)

    @property
    def head_parts(self) -> int:
        """Parts of equal size that the KV heads of a shard are counted in: its micro shards, or what Ulysses divides them into."""
        if self.name == "replicated" and self.attention == "ulysses":
            return self.sp_size
        return self.micro_count

    @property
    def denoises_as_text(self) -> bool:
        """In the one tensor-parallel group of prefill and decode, with its micro shards."""
        return self.denoise == "tp" and self.micro_count > 1

    def ar_parts(self) -> tuple[int, ...]:
        """Parts of its shard's KV heads that this rank attends with in prefill and decode."""
        return (self.micro,) if self.micro_count > 1 else tuple(range(self.head_parts))

    def denoise_parts(self) -> tuple[int, ...]:
        """The same in denoise.

        Ulysses leaves each sequence-parallel rank with 1/sp of its shard's heads; with sp == micro_count these are exactly the heads
        that the rank owns in decode, which is what makes the KV reuse free. Otherwise the rank needs every head of its shard.
        """
        if self.denoises_as_text:
            return self.ar_parts()
        if self.sp_size > 1 and self.attention == "ulysses":
            width = self.head_parts // self.sp_size
            sp_rank = self.topology("denoise").sp_rank
            return tuple(range(sp_rank * width, (sp_rank + 1) * width))
        return tuple(range(self.head_parts))

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Every distinct set of two or more ranks that some phase, in any topology, or the VAE uses, sorted; the same on all ranks.

        Order inside a gather comes from the topology, not from the group, so groups are kept in physical order.
        """
        sets: set[tuple[int, ...]] = set()
        for rank in range(self.world_size):
            plan = self.on_rank(rank)
            candidates = [plan.replica_ranks, plan.picture_ranks, plan.topology("prefill").tp_ranks]
            for kind in self.denoise_kinds:
                topology = replace(plan, denoise=kind).topology("denoise")
                candidates += [topology.tp_ranks, topology.sp_ranks, topology.cfg_ranks]
            sets.update(tuple(sorted(ranks)) for ranks in candidates if len(ranks) > 1)
        return tuple(sorted(sets))

    def check_divides(self, sizes: Mapping[str, int]) -> None:
        """Every named size must split over the ranks of prefill and decode, and so over ``storage_tp`` too; KV heads over those of denoise as well.

        Raises:
            PlanError: names the first size that does not divide and the world sizes that would.
        """
        for what, size in sizes.items():
            parts = self.storage_tp * self.head_parts if what == KV_HEADS else self.ar_tp
            if size % parts:
                fits = [n for n in (1, 2, 4, 8) if all(s % n == 0 for s in sizes.values())]
                raise PlanError(
                    f"{what} {size} cannot be split over {'tensor_parallel' if parts == self.ar_tp else 'the heads of'} {parts} "
                    f"(plan {self.name}); choose {alternatives(fits)} {'rank' if fits == [1] else 'ranks'}"
                )

    def splits_heads(self, kv_heads: int) -> bool:
        """Whether ``kv_heads`` can be split as attention of this plan needs it."""
        return kv_heads % (self.storage_tp * self.head_parts) == 0

    def describe(self) -> str:
        """One line for logs and the Ranks node."""
        if self.world_size == 1:
            return "single: one rank"
        ar = f"AR TP{self.ar_tp}" + (f" on each of {self.replicas} replicas" if self.name == "replicated" else "")
        return f"{self.name}: {ar} · denoise {self.describe_denoise()}"

    def describe_denoise(self) -> str:
        parts = [f"TP{self.topology('denoise').tp_size}"]
        if self.sp_size > 1:
            parts.append(f"SP{self.sp_size} ({self.attention})")
        if self.cfg_size > 1:
            parts.append(f"CFG{self.cfg_size}")
        return "×".join(parts)


def make_plan(
    name: PlanName,
    *,
    world_size: int,
    rank: int = 0,
    denoise: DenoiseKind | None = None,
    attention: AttentionKind = "ulysses",
    storage_tp: int | None = None,
) -> ParallelPlan:
    """Validated plan.

    ``single``: one rank. ``tp``: ``storage_tp == world_size``, one replica. ``hybrid``: 4 ranks with storage_tp 2, 8 ranks with 2 or 4.
    ``replicated``: 2 or more ranks, two replicas unless ``storage_tp`` says otherwise.

    Raises:
        PlanError: what does not fit and what would.
    """
    check_choice("plan", name, PLAN_NAMES)
    check_choice("attention", attention, ATTENTION_KINDS)
    if world_size < 1 or not 0 <= rank < max(world_size, 1):
        raise PlanError(f"rank {rank} of world size {world_size} is not a place in a launch; ranks run from 0 to world size - 1")
    if name == "single" and world_size != 1:
        raise PlanError(f"plan single uses 1 rank but {world_size} are running; choose plan tp or hybrid, or start one rank")
    if name != "single" and world_size == 1:
        raise PlanError(f"plan {name} needs 2 or more ranks but 1 is running; start more with `phase-parallel up --ranks 4`")
    if name in REPLICA_PLANS and storage_tp is None:
        storage_tp = default_storage_tp(name, world_size)
    if name not in REPLICA_PLANS and storage_tp not in (None, world_size):
        raise PlanError(f"plan {name} keeps the weights in {world_size} shards, not {storage_tp}; use plan hybrid for replicas")
    storage = storage_tp if name in REPLICA_PLANS else world_size
    if name in REPLICA_PLANS:
        check_replicas(world_size, storage)
    replicas = world_size // storage
    kind = denoise or ("sp" if replicas > 1 else "tp")
    check_choice("denoise", kind, DENOISE_KINDS)
    check_denoise(name, kind, replicas)
    return ParallelPlan(name, world_size, storage, kind, attention, rank)
