"""``phase-parallel bench denoise --accuracy``: how far the velocities of one step lie from those of the same random model in fp32.

The weights are drawn in bf16 and widened, so that models differ in their arithmetic alone; the prefixes are computed by each model for itself. An error is
the norm of the difference over the norm of the reference, of both branches together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..models.hunyuan_image_3.loading import LoadOptions
from ..models.hunyuan_image_3.model import HunyuanImage3Model
from ..parallel.plan import make_plan
from .ar import Task, choose_tasks
from .denoise import GuidedStep
from .denoise_cases import Experts
from .denoise_table import free_memory, use_grouped_mm
from .environment import describe_machine
from .errors import BenchError
from .grouped_mm_experts import GROUPED_MM
from .one_rank import OneRankCommunicator
from .random_model import RandomShard, checked_options, random_shard
from .release import Release, from_spec, sizes
from .report import print_head, rank_words

ALLOWED = 1.5
"""An error of fused kernels over that of eager bf16: both round to bf16, and in other places."""
TASK = "t2i"
"""Without reference pictures, whose features would be rounded before the step."""


@dataclass(frozen=True)
class AccuracyOptions:
    """``experts``: those to compare beside the eager model; none are the usual ones."""

    experts: tuple[Experts, ...]
    layers: int
    small: bool


def measure(options: AccuracyOptions, device: torch.device) -> dict[str, Any]:
    """Errors of eager bf16 and of each choice of experts with the kernels that run here."""
    built = from_spec(sizes(options.layers, small=options.small))
    (task,) = choose_tasks((TASK,), small=options.small)
    plan = make_plan("single", world_size=1)
    shard = random_shard(built.config, plan, LoadOptions(weight_dtype="bf16"), device=device)
    found: dict[str, torch.Tensor] = {}
    reference, case = _velocity(built, task, _widened(shard), LoadOptions(weight_dtype="fp32", kernels="eager"), device)
    free_memory(device)
    found["eager bf16"], _ = _velocity(built, task, shard, LoadOptions(weight_dtype="bf16", kernels="eager"), device)
    for experts in options.experts or ("auto",):
        backend = "auto" if experts == GROUPED_MM else experts
        load = checked_options(LoadOptions(weight_dtype="bf16", moe_backend=backend), device)
        velocity, words = _velocity(built, task, shard, load, device, grouped_mm=experts == GROUPED_MM)
        found[f"{words['kernels']} bf16, experts {words['moe']}"] = velocity
    eager = error_of(found["eager bf16"], reference)
    rows = [{"kernels": name, "error": (error := error_of(velocity, reference)), "of_eager": error / eager} for name, velocity in found.items()]
    about = {"ranks": 1, "alone": False, "layers": options.layers, "task": TASK, "allowed": ALLOWED, **case["size"]}
    return {**describe_machine(device), **about, "rows": rows}


def _widened(shard: RandomShard) -> RandomShard:
    return replace(shard, resident={name: tensor.float() for name, tensor in shard.resident.items()}, dtype=torch.float32)


def _velocity(
    built: Release, task: Task, shard: RandomShard, load: LoadOptions, device: torch.device, *, grouped_mm: bool = False
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Both branches' velocity, in fp32, and words about who computed it."""
    plan = make_plan("single", world_size=1)
    model: HunyuanImage3Model = shard.model(built.config, plan, OneRankCommunicator(plan), load, device)
    if grouped_mm:
        use_grouped_mm(model)
    step = GuidedStep(model, built, task, "batched")
    # fp32 means fp32: cuDNN would take shorter numbers for its convolutions.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        velocity = step.velocity("eager")
    kernels = model.weights["denoise"].kernels
    size = {"prefix": step.prefix, "image_tokens": step.image_tokens}
    return velocity, {"kernels": kernels.name, "moe": kernels.moe_words, "size": size}


def error_of(velocity: torch.Tensor, reference: torch.Tensor) -> float:
    """Raises BenchError for a velocity that is not finite, or a reference of zeros."""
    error = float((velocity.double() - reference.double()).norm() / reference.double().norm())
    if not error < float("inf"):
        raise BenchError("a velocity holds NaN or infinity, or the reference is zero, so errors mean nothing; try other --layers.")
    return error


def print_result(result: dict[str, Any]) -> None:
    print_head(f"velocity against fp32, {rank_words(result)}, {result['layers']} layers", result)
    for row in result["rows"]:
        print(f"{result['task']:5} {result['prefix']:5}+{result['image_tokens']} {row['kernels']:40} error {row['error']:.3e}, {row['of_eager']:.2f} x eager")


def require_close(result: dict[str, Any]) -> None:
    """Raises BenchError when kernels are further from fp32 than allowed."""
    for row in result["rows"]:
        if row["of_eager"] > result["allowed"]:
            raise BenchError(
                f"the velocity of {row['kernels']} is {row['of_eager']:.2f} times as far from fp32 as that of eager bf16, and "
                f"{result['allowed']:g} times are allowed; the kernels lose digits."
            )
