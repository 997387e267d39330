"""The words of a plan and which of them go together. Pure arithmetic, as :mod:`.plan`."""

from __future__ import annotations

from typing import Literal, get_args

PlanName = Literal["single", "tp", "hybrid", "replicated"]
DenoiseKind = Literal["tp", "sp", "cfg", "cfg_sp"]
AttentionKind = Literal["ulysses", "kv_gather"]

REPLICA_PLANS: frozenset[PlanName] = frozenset({"hybrid", "replicated"})
"""Plans that hold the weights more than once."""

PLAN_NAMES: tuple[PlanName, ...] = get_args(PlanName)
DENOISE_KINDS: tuple[DenoiseKind, ...] = get_args(DenoiseKind)
ATTENTION_KINDS: tuple[AttentionKind, ...] = get_args(AttentionKind)


class PlanError(ValueError):
    """A plan that cannot exist; the message says which number does not fit and what would."""


def alternatives(values: list[int]) -> str:
    text = [str(v) for v in values]
    return text[0] if len(text) == 1 else ", ".join(text[:-1]) + " or " + text[-1]


def default_storage_tp(name: PlanName, world_size: int) -> int:
    if world_size % 2:
        raise PlanError(f"plan {name} needs an even number of ranks but {world_size} are running; choose 4 or 8 ranks, or plan tp")
    if name == "replicated":
        return world_size // 2
    if world_size < 4:
        raise PlanError(f"plan hybrid needs 4 or more ranks but {world_size} are running; choose plan tp, or start 4 ranks")
    return 2 if world_size == 4 else world_size // 2


def check_replicas(world_size: int, storage_tp: int) -> None:
    """In plan hybrid each replica of a shard must activate its own micro shard: AR_TP / storage_TP == replicas."""
    if storage_tp < 1 or world_size % storage_tp:
        fits = [s for s in range(2, world_size) if world_size % s == 0]
        raise PlanError(
            f"AR tensor_parallel {world_size} / storage tensor_parallel {storage_tp} must equal the number of replicas, "
            f"but {world_size} ranks do not split into whole replicas of {storage_tp} shards; "
            + (f"storage_tp {alternatives(fits)} would fit" if fits else "use plan tp instead")
        )
    if storage_tp == world_size:
        raise PlanError(f"storage_tp {storage_tp} on {world_size} ranks leaves one replica, which is plan tp; choose plan tp or a smaller storage_tp")


def check_denoise(name: PlanName, kind: DenoiseKind, replicas: int) -> None:
    if kind == "tp" and replicas > 1 and name != "hybrid":
        raise PlanError(f"denoise tp uses one replica but plan {name} has {replicas}; choose denoise sp or cfg")
    if kind != "tp" and replicas == 1:
        raise PlanError(f"denoise {kind} needs 2 or more replicas but plan {name} has 1; choose plan hybrid, or denoise tp")
    if kind == "cfg" and replicas != 2:
        raise PlanError(f"denoise cfg splits the two guidance branches over 2 replicas but there are {replicas}; choose cfg_sp or sp")
    if kind == "cfg_sp" and (replicas < 4 or replicas % 2):
        raise PlanError(f"denoise cfg_sp needs 4, 6 … replicas but there are {replicas}; choose cfg or sp")


def check_choice(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise PlanError(f"unknown {what} {value!r}; choose one of {', '.join(choices)}")
