"""The parallel plan: which rank holds what, and who talks to whom in which phase. Pure arithmetic.

Nothing here needs a process, a device or torch, so every rank of every plan can be tested on one CPU. Words: a *shard* is the part
of the weights that stays resident on a rank (``storage_tp`` of them), a *replica* is one complete set of shards, and a
*micro_shard* is the part of a shard that a rank uses while all ranks work as one tensor-parallel group (prefill and decode of plan
``hybrid``). In plan ``replicated`` each replica reads and writes the text by itself, and all of them write the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

Phase = Literal["prefill", "decode", "denoise"]
PlanName = Literal["single", "tp", "hybrid", "replicated"]
DenoiseKind = Literal["tp", "sp", "cfg", "cfg_sp"]
AttentionKind = Literal["ulysses", "kv_gather"]

PHASES: tuple[Phase, ...] = get_args(Phase)
REPLICA_PLANS: frozenset[PlanName] = frozenset({"hybrid", "replicated"})
"""Plans that hold the weights more than once."""

PLAN_NAMES: tuple[PlanName, ...] = get_args(PlanName)
DENOISE_KINDS: tuple[DenoiseKind, ...] = get_args(DenoiseKind)
ATTENTION_KINDS: tuple[AttentionKind, ...] = get_args(AttentionKind)
KV_HEADS = "num_key_value_heads"


class PlanError(ValueError):
    """A plan that cannot exist; the message says which number does not fit and what would."""


@dataclass(frozen=True)
class Topology:
    """One rank's groups in one phase. All ``*_ranks`` are physical ranks in the order that ordered gathers use."""

    phase: Phase
    tp_ranks: tuple[int, ...]
    tp_rank: int
    sp_ranks: tuple[int, ...]
    sp_rank: int
    cfg_ranks: tuple[int, ...]
    cfg_rank: int
    micro: int | None
    """Micro shard in use, or None when the whole resident shard is."""

    @property
    def tp_size(self) -> int:
        return len(self.tp_ranks)

    @property
    def sp_size(self) -> int:
        return len(self.sp_ranks)

    @property
    def cfg_size(self) -> int:
        return len(self.cfg_ranks)


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

    def topology(self, phase: Phase) -> Topology:
        """Groups of this rank in ``phase``. Prefill and decode: all ranks in one TP group, each with its own micro shard (``replicated``: each
        replica in its own, with whole shards)."""
        if phase not in PHASES:
            raise PlanError(f"unknown phase {phase!r}; phases are {', '.join(PHASES)}")
        alone = (self.rank,)
        if phase != "denoise":
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

    def ar_parts(self) -> tuple[int, ...]:
        """Parts of its shard's KV heads that this rank attends with in prefill and decode."""
        return (self.micro,) if self.micro_count > 1 else tuple(range(self.head_parts))

    def denoise_parts(self) -> tuple[int, ...]:
        """The same in denoise.

        Ulysses leaves each sequence-parallel rank with 1/sp of its shard's heads; with sp == micro_count these are exactly the heads
        that the rank owns in decode, which is what makes the KV reuse free. Otherwise the rank needs every head of its shard.
        """
        if self.sp_size > 1 and self.attention == "ulysses":
            width = self.head_parts // self.sp_size
            sp_rank = self.topology("denoise").sp_rank
            return tuple(range(sp_rank * width, (sp_rank + 1) * width))
        return tuple(range(self.head_parts))

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Every distinct set of two or more ranks that some phase or the VAE uses, sorted; the same on all ranks.

        Order inside a gather comes from the topology, not from the group, so groups are kept in physical order.
        """
        sets: set[tuple[int, ...]] = set()
        for rank in range(self.world_size):
            plan = self.on_rank(rank)
            candidates = [plan.replica_ranks, plan.picture_ranks]
            for phase in PHASES:
                topology = plan.topology(phase)
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
                    f"(plan {self.name}); choose {_alternatives(fits)} {'rank' if fits == [1] else 'ranks'}"
                )

    def describe(self) -> str:
        """One line for logs and the Ranks node."""
        if self.world_size == 1:
            return "single: one rank"
        ar = f"AR TP{self.ar_tp}" + (f" on each of {self.replicas} replicas" if self.name == "replicated" else "")
        parts = [f"TP{self.storage_tp}"]
        if self.sp_size > 1:
            parts.append(f"SP{self.sp_size} ({self.attention})")
        if self.cfg_size > 1:
            parts.append(f"CFG{self.cfg_size}")
        return f"{self.name}: {ar} · denoise {'×'.join(parts)}"


def _alternatives(values: list[int]) -> str:
    text = [str(v) for v in values]
    return text[0] if len(text) == 1 else ", ".join(text[:-1]) + " or " + text[-1]


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
    _check_choice("plan", name, PLAN_NAMES)
    _check_choice("attention", attention, ATTENTION_KINDS)
    if world_size < 1 or not 0 <= rank < max(world_size, 1):
        raise PlanError(f"rank {rank} of world size {world_size} is not a place in a launch; ranks run from 0 to world size - 1")
    if name == "single" and world_size != 1:
        raise PlanError(f"plan single uses 1 rank but {world_size} are running; choose plan tp or hybrid, or start one rank")
    if name != "single" and world_size == 1:
        raise PlanError(f"plan {name} needs 2 or more ranks but 1 is running; start more with `phase-parallel up --ranks 4`")
    if name in REPLICA_PLANS and storage_tp is None:
        storage_tp = _default_storage_tp(name, world_size)
    if name not in REPLICA_PLANS and storage_tp not in (None, world_size):
        raise PlanError(f"plan {name} keeps the weights in {world_size} shards, not {storage_tp}; use plan hybrid for replicas")
    storage = storage_tp if name in REPLICA_PLANS else world_size
    if name in REPLICA_PLANS:
        _check_replicas(world_size, storage)
    replicas = world_size // storage
    kind = denoise or ("sp" if replicas > 1 else "tp")
    _check_choice("denoise", kind, DENOISE_KINDS)
    _check_denoise(name, kind, replicas)
    return ParallelPlan(name, world_size, storage, kind, attention, rank)


def _default_storage_tp(name: PlanName, world_size: int) -> int:
    if world_size % 2:
        raise PlanError(f"plan {name} needs an even number of ranks but {world_size} are running; choose 4 or 8 ranks, or plan tp")
    if name == "replicated":
        return world_size // 2
    if world_size < 4:
        raise PlanError(f"plan hybrid needs 4 or more ranks but {world_size} are running; choose plan tp, or start 4 ranks")
    return 2 if world_size == 4 else world_size // 2


def _check_replicas(world_size: int, storage_tp: int) -> None:
    """In plan hybrid each replica of a shard must activate its own micro shard: AR_TP / storage_TP == replicas."""
    if storage_tp < 1 or world_size % storage_tp:
        fits = [s for s in range(2, world_size) if world_size % s == 0]
        raise PlanError(
            f"AR tensor_parallel {world_size} / storage tensor_parallel {storage_tp} must equal the number of replicas, "
            f"but {world_size} ranks do not split into whole replicas of {storage_tp} shards; "
            + (f"storage_tp {_alternatives(fits)} would fit" if fits else "use plan tp instead")
        )
    if storage_tp == world_size:
        raise PlanError(f"storage_tp {storage_tp} on {world_size} ranks leaves one replica, which is plan tp; choose plan tp or a smaller storage_tp")


def _check_denoise(name: PlanName, kind: DenoiseKind, replicas: int) -> None:
    if kind == "tp" and replicas > 1:
        raise PlanError(f"denoise tp uses one replica but plan {name} has {replicas}; choose denoise sp or cfg")
    if kind != "tp" and replicas == 1:
        raise PlanError(f"denoise {kind} needs 2 or more replicas but plan {name} has 1; choose plan hybrid, or denoise tp")
    if kind == "cfg" and replicas != 2:
        raise PlanError(f"denoise cfg splits the two guidance branches over 2 replicas but there are {replicas}; choose cfg_sp or sp")
    if kind == "cfg_sp" and (replicas < 4 or replicas % 2):
        raise PlanError(f"denoise cfg_sp needs 4, 6 … replicas but there are {replicas}; choose cfg or sp")


def _check_choice(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise PlanError(f"unknown {what} {value!r}; choose one of {', '.join(choices)}")
