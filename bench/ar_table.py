"""The table of ``phase-parallel bench ar``: runs the measurements on one rank, prints them, writes them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..kernels.kernel_set import MoeBackend
from ..kernels.moe import MoeLayout
from ..models.hunyuan_image_3.loading import LoadOptions
from ..parallel.cluster import Cluster
from ..parallel.collectives import Communicator
from ..parallel.plan import ParallelPlan, make_plan
from ..parallel.section import SectionKey, open_section
from .ar import ArRow, PrefillRow, choose_tasks, measure_decode, measure_eager_decode, measure_prefill, prompt_row, reductions
from .environment import describe_machine
from .errors import BenchError
from .one_rank import OneRankCommunicator
from .random_model import checked_options, random_model
from .release import from_spec, sizes
from .report import print_head, print_split, rank_words


@dataclass(frozen=True)
class ArOptions:
    """``ranks`` processes of plan ``scheme``, or with ``alone`` one process that plays one of them. ``small``: toy sizes, to try the program."""

    scheme: str
    ranks: int
    alone: bool
    layers: int
    layout: MoeLayout
    moe_backend: MoeBackend
    small: bool
    tokens: int
    repeats: int
    eager: bool


def plan_of(options: ArOptions, rank: int) -> ParallelPlan:
    name = options.scheme if options.ranks > 1 else "single"
    return make_plan(name, world_size=options.ranks, rank=rank)


def run_alone(options: ArOptions, device: torch.device) -> dict[str, Any]:
    plan = plan_of(options, 0)
    return _measure(options, plan, OneRankCommunicator(plan), device, lambda: None)


def run_rank(options: ArOptions, cluster: Cluster) -> dict[str, Any]:
    """Collective; every rank measures, the slowest of each row counts."""
    plan = plan_of(options, cluster.rank)
    with open_section(cluster, SectionKey("bench", "ar", 0, ""), plan, phase="bench") as section:
        comm = section.communicator
        result = _measure(options, plan, comm, cluster.device, lambda: comm.control_gather([0]))
        for row in [*result["decode"], *result["prefill"]]:
            key = "ms_per_token" if "ms_per_token" in row else "ms_prefill"
            slowest = max(micro for (micro,) in comm.control_gather([round(row[key]["median"] * 1e6)]))
            row[key]["slowest_rank"] = slowest / 1e6
        require_equal_tokens(comm, result["decode"])
        section.exit("")
    return result


def require_equal_tokens(comm: Communicator, rows: list[dict[str, Any]]) -> None:
    """All ranks must have written the same text in every row."""
    for row in rows:
        mine = int(row["tokens_digest"] or "0", 16) >> 1  # the gather carries signed numbers
        if len({digest for (digest,) in comm.control_gather([mine])}) != 1:
            raise BenchError(f"the ranks wrote different tokens in {row['task']} with {row['decode']} and {row['reduction']}")


def _measure(
    options: ArOptions, plan: ParallelPlan, comm: Communicator, device: torch.device, barrier: Callable[[], None]
) -> dict[str, Any]:
    built = from_spec(sizes(options.layers, small=options.small))
    load = checked_options(LoadOptions(moe_layout=options.layout, moe_backend=options.moe_backend), device)
    model = random_model(built.config, plan, comm, load, device=device)
    decode: list[ArRow] = []
    prefill: list[PrefillRow] = []
    for task in choose_tasks(small=options.small):
        row = prompt_row(built, task)
        prefill.append(measure_prefill(model, row, task, repeats=options.repeats, barrier=barrier))
        for reduction, name in reductions(model, alone=options.alone):
            decode.append(measure_decode(model, row, task, reduction, name, tokens=options.tokens, repeats=options.repeats, barrier=barrier))
        if options.eager:
            decode.append(measure_eager_decode(model, row, task, tokens=8, barrier=barrier))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {
        **describe_machine(device),
        "scheme": plan.describe(),
        "ranks": plan.world_size,
        "alone": options.alone,
        "layers": options.layers,
        "moe": options.layout,
        "experts": model.weights["decode"].kernels.moe_words,
        "memory_gb": torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else 0.0,
        "decode": [asdict(row) for row in decode],
        "prefill": [asdict(row) for row in prefill],
    }


def print_result(result: dict[str, Any]) -> None:
    print_head(f"{result['scheme']}, {rank_words(result)}, {result['layers']} layers, {result['moe']}, experts {result['experts']}", result)
    for row in result["prefill"]:
        ms = row["ms_prefill"]
        spread = f"{ms['median']:9.2f} ms  ({ms['minimum']:.2f} … {ms['maximum']:.2f})"
        print(f"{row['task']:5} prefill {row['tokens']:5} tokens {row['moe_backend']:10}  {spread}, kernels {row['ms_device']:.2f}")
    for row in result["decode"]:
        ms, floor = row["ms_per_token"], row["floor_ms_per_token"]
        print(
            f"{row['task']:5} {row['decode']:6} {row['moe_backend']:10} {row['reduction']:24} {ms['median']:9.3f} ms/token  "
            f"({ms['minimum']:.3f} … {ms['maximum']:.3f}), floor {floor:.2f}: {100 * floor / ms['median']:.0f} %"
        )
    for kind in ("decode", "prefill"):
        for row in result[kind]:
            print_split(f"{kind} {row['task']} {row.get('reduction', '')}", row["split_us"])
