"""Which plan: what ``auto`` means for the ranks and their memory, and what can run on several machines. Pure arithmetic, as :mod:`.plan`."""

from __future__ import annotations

from .plan import PHASES, AttentionKind, DenoiseKind, ParallelPlan, PlanError, PlanName, make_plan


def plan_on_machines(
    name: PlanName,
    *,
    world_size: int,
    machine_ranks: int,
    denoise: DenoiseKind | None = None,
    attention: AttentionKind = "ulysses",
) -> ParallelPlan:
    """Rank 0's validated plan on machines of ``machine_ranks`` ranks each; ``replicated`` keeps one replica on each of several machines.

    Raises:
        PlanError: what does not fit and what would, as :func:`make_plan`, or a tensor-parallel group that would cross machines.
    """
    several = machine_ranks < world_size
    storage_tp = machine_ranks if several and name == "replicated" else None
    plan = make_plan(name, world_size=world_size, denoise=denoise, attention=attention, storage_tp=storage_tp)
    check_machines(plan, machine_ranks)
    return plan


def check_machines(plan: ParallelPlan, machine_ranks: int) -> None:
    """A tensor-parallel group adds up every layer twice, and between machines each sum would take longer than the layer.

    Raises:
        PlanError: names the phase and the ranks whose group would cross machines.
    """
    for phase in PHASES:
        for rank in range(plan.world_size):
            ranks = plan.on_rank(rank).topology(phase).tp_ranks
            if len({member // machine_ranks for member in ranks}) > 1:
                raise PlanError(
                    f"plan {plan.name} adds up the layers of {phase} over ranks {', '.join(map(str, sorted(ranks)))}, which are on "
                    f"{plan.world_size // machine_ranks} machines; tensor parallelism stays inside a machine, choose plan replicated"
                )


def usual_plan(world_size: int, machine_ranks: int) -> PlanName:
    """What ``auto`` means where memory allows."""
    if world_size == 1:
        return "single"
    if machine_ranks < world_size:
        return "replicated"
    return "hybrid" if world_size in (4, 8) else "tp"


def choose_plan(
    world_size: int, *, free_bytes_per_rank: int, sharded_bytes: int, replicated_bytes: int, machine_ranks: int | None = None
) -> tuple[PlanName, str]:
    """What ``auto`` means, and why in one sentence. ``free_bytes_per_rank``: the smallest of all ranks; ``machine_ranks``: where they are
    on several machines, how many on each.

    Raises:
        PlanError: no plan fits the memory; says needed and free GB.
    """
    gb = 1e9
    if world_size == 1:
        need = sharded_bytes + replicated_bytes
        _check_memory("single", need, free_bytes_per_rank)
        return "single", "single: one rank is running"
    if machine_ranks is not None and machine_ranks < world_size:
        need = sharded_bytes / machine_ranks + replicated_bytes
        _check_memory("replicated", need, free_bytes_per_rank)
        return "replicated", f"replicated: tensor parallelism stays inside each of {world_size // machine_ranks} machines"
    fewest = sharded_bytes / world_size + replicated_bytes
    if world_size >= 4 and world_size % 2 == 0:
        need = sharded_bytes / make_plan("hybrid", world_size=world_size).storage_tp + replicated_bytes
        if need <= free_bytes_per_rank:
            return "hybrid", f"hybrid: {need / gb:.1f} GB of weights per rank fit in {free_bytes_per_rank / gb:.1f} GB free"
        _check_memory("tp", fewest, free_bytes_per_rank)
        return "tp", (
            f"tp: two replicas need {need / gb:.1f} GB per rank but {free_bytes_per_rank / gb:.1f} GB are free; "
            f"{world_size} shards need {fewest / gb:.1f} GB"
        )
    _check_memory("tp", fewest, free_bytes_per_rank)
    return "tp", f"tp: {world_size} ranks are too few, or too odd, for two replicas"


def _check_memory(name: str, need: float, free: int) -> None:
    if need > free:
        raise PlanError(
            f"plan {name} needs {need / 1e9:.1f} GB of weights per rank but the fullest device has {free / 1e9:.1f} GB free; "
            "free memory, or start more ranks"
        )
