"""The table of ``phase-parallel bench denoise``: which plans, expert paths and ways of guidance, measured on one rank, printed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from ..kernels.flashinfer_experts import why_not_flashinfer
from ..models.hunyuan_image_3.loading import LoadOptions, trunk_dtype
from ..models.hunyuan_image_3.model import HunyuanImage3Model
from ..parallel.cluster import Cluster
from ..parallel.collectives import Communicator
from ..parallel.plan import ParallelPlan
from ..parallel.section import SectionKey, open_section
from .denoise import measure_step
from .denoise_cases import Case, DenoiseOptions, cases, pictures
from .denoise_scaling import print_scaling
from .environment import describe_machine
from .errors import BenchError
from .grouped_mm_experts import GROUPED_MM, why_not_grouped_mm, with_grouped_mm
from .one_rank import OneRankCommunicator
from .random_model import RandomShard, checked_options, random_shard
from .release import Release, from_spec, sizes
from .report import print_head, print_split, rank_words


class Shards:
    """The resident weights of the last case, which the next one may go on with."""

    def __init__(self, built: Release, device: torch.device):
        self._built, self._device = built, device
        self._key: object = None
        self._shard: RandomShard | None = None

    def get(self, plan: ParallelPlan, options: LoadOptions) -> RandomShard:
        if not self.holds(plan, options):
            self.drop()
            self._shard, self._key = random_shard(self._built.config, plan, options, device=self._device), self._key_of(plan, options)
        return self._shard

    def holds(self, plan: ParallelPlan, options: LoadOptions) -> bool:
        return self._key == self._key_of(plan, options)

    def drop(self) -> None:
        self._shard, self._key = None, None
        free_memory(self._device)

    @staticmethod
    def _key_of(plan: ParallelPlan, options: LoadOptions) -> object:
        return plan.name, plan.world_size, plan.storage_tp, plan.rank, options.moe_layout


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def run_alone(options: DenoiseOptions, device: torch.device) -> dict[str, Any]:
    built = from_spec(sizes(options.layers, small=options.small))
    shards, rows = Shards(built, device), []
    for case in cases(options):
        plan = case.scheme.on(0)
        rows += _measure(options, case, plan, OneRankCommunicator(plan), built, shards, device, lambda: None)
    return _result(options, device, built, rows)


def run_rank(options: DenoiseOptions, cluster: Cluster) -> dict[str, Any]:
    """Collective; every rank measures, the slowest of each row counts, and all must have made the same latent."""
    built = from_spec(sizes(options.layers, small=options.small))
    shards, rows = Shards(built, cluster.device), []
    for number, case in enumerate(cases(options)):
        plan = case.scheme.on(cluster.rank)
        with open_section(cluster, SectionKey("bench", "denoise", number, ""), plan, phase="bench") as section:
            comm = section.communicator
            made = _measure(options, case, plan, comm, built, shards, cluster.device, lambda comm=comm: comm.control_gather([0]))
            for row in made:
                if "not_run" not in row:
                    compare_ranks(comm, row)
            section.exit("")
        rows += made
    return _result(options, cluster.device, built, rows)


def compare_ranks(comm: Communicator, row: dict[str, Any]) -> None:
    mine = int(row["digest"], 16) >> 1  # the gather carries signed numbers
    slowest, peak = round(row["ms_per_step"]["median"] * 1e6), round(row["peak_gb"] * 1e9)
    everyone = comm.control_gather([mine, slowest, peak])
    if len({digest for digest, _, _ in everyone}) != 1:
        raise BenchError(f"the ranks made different latents in {row['task']} with {row['scheme']}, {row['moe']} and {row['cfg']} guidance")
    row["ms_per_step"]["slowest_rank"] = max(ns for _, ns, _ in everyone) / 1e6
    row["peak_gb_of_ranks"] = [nbytes / 1e9 for _, _, nbytes in everyone]


def _measure(
    options: DenoiseOptions,
    case: Case,
    plan: ParallelPlan,
    comm: Communicator,
    built: Release,
    shards: Shards,
    device: torch.device,
    barrier: Callable[[], None],
) -> list[dict[str, Any]]:
    missing = _missing(options, case, built, device)
    if missing is not None:
        return list(_not_run(options, case, plan, missing))
    backend = "auto" if case.experts == GROUPED_MM else case.experts
    load = checked_options(LoadOptions(moe_layout=case.layout, moe_path=case.path, moe_backend=backend, reduction=options.reduction), device)
    model = shards.get(plan, load).model(built.config, plan, comm, load, device)
    if case.experts == GROUPED_MM:
        use_grouped_mm(model)
    moe = f"{lying(case, plan)}, {model.weights['denoise'].kernels.moe_words}"
    rows = []
    for task, size in pictures(options):
        for cfg in case.cfg:
            step = {"size": size, "scheme": case.scheme.name, "moe": moe, "repeats": options.repeats, "barrier": barrier}
            for row in measure_step(model, built, task, cfg, **step):
                rows.append(asdict(row))
                if plan.rank == 0:  # a long run that is stopped has shown what it had
                    print(row_words(rows[-1], options.alone), file=sys.stderr, flush=True)
            free_memory(device)
    return rows


def lying(case: Case, plan: ParallelPlan) -> str:
    """How the experts of a step lie and are computed."""
    return "one piece" if plan.micro_count == 1 else "micro shard" if plan.topology("denoise").micro is not None else f"{case.layout} {case.path}"


def use_grouped_mm(model: HunyuanImage3Model) -> None:
    """Of a step alone: the prefixes are computed as ever."""
    weights = model.weights["denoise"]
    model.weights = {**model.weights, "denoise": replace(weights, kernels=with_grouped_mm(weights.kernels))}


def _missing(options: DenoiseOptions, case: Case, built: Release, device: torch.device) -> str | None:
    """Why one row among others cannot be measured here; what was asked for alone is refused with its own sentence."""
    if case.experts == GROUPED_MM:
        reason = why_not_grouped_mm()
        if reason is not None and not options.moe_table:
            raise BenchError(f"{reason}; leave --moe-backend grouped_mm out, or install a newer torch.")
        return reason
    if case.experts != "flashinfer" or not (options.moe_table or len(options.experts) > 1):
        return None
    return why_not_flashinfer(device, trunk_dtype(built.config, "auto"))


def _not_run(options: DenoiseOptions, case: Case, plan: ParallelPlan, reason: str) -> Iterator[dict[str, Any]]:
    for task, size in pictures(options):
        moe = f"{lying(case, plan)}, {case.experts}"
        row = {"task": task.name, "prefix": task.tokens, "size": size, "scheme": case.scheme.name, "moe": moe, "not_run": reason}
        if plan.rank == 0:
            print(row_words(row, options.alone), file=sys.stderr, flush=True)
        yield row


def _result(options: DenoiseOptions, device: torch.device, built: Release, rows: list[dict[str, Any]]) -> dict[str, Any]:
    about = {"ranks": options.ranks, "alone": options.alone, "layers": options.layers, "hidden_size": built.config.hidden_size}
    return {**describe_machine(device), **about, "rows": rows}


def row_words(row: dict[str, Any], alone: bool) -> str:
    if "not_run" in row:
        return f"{row['task']:5} {row['prefix']:5}{'':6}{row['scheme']:17} {row['moe']:32} not run: {row['not_run']}"
    ms, floor = row["ms_per_step"], row["floor_ms"]
    left_out = ""
    if alone:
        left_out = f", left out {'not known' if row['left_out_ms'] is None else format(row['left_out_ms'], '.1f')}"
    return (
        f"{row['task']:5} {row['prefix']:5}+{row['image_tokens']} {row['scheme']:17} {row['moe']:32} {row['cfg']:8} {row['launch']:5} {row['reduction']:11}"
        f"{ms['median']:9.2f} ms/step ({ms['minimum']:.2f} … {ms['maximum']:.2f}), kernels {row['ms_device']:.2f}, "
        f"floor {floor:.2f}: {100 * floor / ms['median']:.0f} %{left_out}, {row['peak_gb']:.1f} GB, busiest expert {row['busiest_expert']:.2f} x, "
        f"latent {row['digest'][:6]}"
    )


def print_result(result: dict[str, Any]) -> None:
    print_head(f"denoise with guidance, {rank_words(result)}, {result['layers']} layers", result)
    if result["alone"]:
        print("   collectives do nothing here; what they cost by NCCL's measured times on 4 x H200 stands behind as 'left out' and is in no other number")
    for row in result["rows"]:
        print(row_words(row, result["alone"]))
    print_scaling(result)
    for row in result["rows"]:
        if "not_run" in row or row["task"] == "sizes":
            continue
        print_split(f"{row['task']} {row['scheme']} {row['moe']} {row['cfg']} {row['launch']}", row["groups_us"])
