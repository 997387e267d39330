"""The table of ``phase-parallel bench denoise``: which plans, expert paths and ways of guidance, measured on one rank, printed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..kernels.kernel_set import MoeBackend
from ..kernels.moe import MoeLayout, MoePath
from ..models.hunyuan_image_3.denoise import CfgMode
from ..models.hunyuan_image_3.loading import LoadOptions
from ..models.reduction import ReductionChoice
from ..parallel.cluster import Cluster
from ..parallel.collectives import Communicator
from ..parallel.plan import AttentionKind, DenoiseKind, ParallelPlan, PlanName, make_plan
from ..parallel.section import SectionKey, open_section
from .ar import choose_tasks
from .denoise import measure_step
from .environment import describe_machine
from .errors import BenchError
from .one_rank import OneRankCommunicator
from .random_model import RandomShard, checked_options, random_shard
from .release import Release, from_spec, sizes
from .report import print_head, print_split, rank_words


@dataclass(frozen=True)
class Scheme:
    name: str
    plan: PlanName
    ranks: int
    denoise: DenoiseKind
    attention: AttentionKind = "ulysses"

    def on(self, rank: int) -> ParallelPlan:
        return make_plan(self.plan, world_size=self.ranks, rank=rank, denoise=self.denoise, attention=self.attention)


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("hybrid4-cfg", "hybrid", 4, "cfg"),
        Scheme("hybrid4-ulysses", "hybrid", 4, "sp"),
        Scheme("hybrid4-kv_gather", "hybrid", 4, "sp", "kv_gather"),
        Scheme("tp4", "tp", 4, "tp"),
        Scheme("tp2", "tp", 2, "tp"),
        Scheme("single", "single", 1, "tp"),
    )
}


@dataclass(frozen=True)
class DenoiseOptions:
    """``schemes`` by name, all of ``ranks`` ranks unless ``alone``, when one process plays one rank of each. Empty choices mean all of them."""

    schemes: tuple[str, ...]
    ranks: int
    alone: bool
    tasks: tuple[str, ...]
    cfg: tuple[CfgMode, ...]
    layouts: tuple[MoeLayout, ...]
    paths: tuple[MoePath, ...]
    moe_backend: MoeBackend
    reduction: ReductionChoice
    layers: int
    small: bool
    repeats: int


@dataclass(frozen=True)
class Case:
    """One model of one scheme, and the ways of guidance to run it with."""

    scheme: Scheme
    layout: MoeLayout
    path: MoePath
    cfg: tuple[CfgMode, ...]


def choose_schemes(names: Sequence[str], ranks: int, alone: bool, *, instead: str = ", or --alone for one rank of any") -> tuple[str, ...]:
    """Those of ``ranks`` ranks; alone without a number of ranks (0), all but the one whose weights one device cannot hold. ``instead``: what else a
    user can do.

    Raises:
        BenchError: nothing is left, or a name belongs to another number of ranks.
    """
    fitting = [s.name for s in SCHEMES.values() if s.ranks == ranks or (alone and ranks == 0 and s.ranks > 1)]
    wrong = [name for name in names if name not in fitting and not (alone and ranks == 0)]
    if wrong or not fitting:
        what = f"scheme {wrong[0]} does not run on {ranks} ranks" if wrong else f"no scheme runs on {ranks} ranks"
        raise BenchError(f"{what}; give --ranks {', '.join(sorted({str(s.ranks) for s in SCHEMES.values()}))}{instead}.")
    return tuple(names) or tuple(fitting)


def cases(options: DenoiseOptions) -> Iterator[Case]:
    """Cases whose weights are the same follow each other. What would be the same run twice is left out: a shard in one piece has one layout and one
    path, and a rank with one branch has nothing to batch."""
    for layout in ("micro_major", "expert_major"):
        for name in options.schemes:
            scheme = SCHEMES[name]
            plan = scheme.on(0)
            for path in ("multi_micro", "two_dispatch"):
                asked = (layout in options.layouts or not options.layouts) and (path in options.paths or not options.paths)
                if plan.micro_count == 1:
                    asked = (layout, path) == ("micro_major", "multi_micro")
                if not asked or (layout, path) == ("expert_major", "two_dispatch"):
                    continue
                modes = options.cfg or (("batched",) if path == "two_dispatch" or layout == "expert_major" else ("batched", "serial"))
                yield Case(scheme, layout, path, ("batched",) if plan.cfg_size > 1 else modes)


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
    return _result(options, device, rows)


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
                compare_ranks(comm, row)
            section.exit("")
        rows += made
    return _result(options, cluster.device, rows)


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
    load = checked_options(LoadOptions(moe_layout=case.layout, moe_path=case.path, moe_backend=options.moe_backend, reduction=options.reduction), device)
    model = shards.get(plan, load).model(built.config, plan, comm, load, device)
    one_piece = plan.micro_count == 1
    moe = f"{'one piece' if one_piece else f'{case.layout} {case.path}'}, {model.weights['denoise'].kernels.moe_words}"
    rows: list[dict[str, Any]] = []
    for task in choose_tasks(options.tasks, small=options.small):
        for cfg in case.cfg:
            for row in measure_step(model, built, task, cfg, scheme=case.scheme.name, moe=moe, repeats=options.repeats, barrier=barrier):
                rows.append(asdict(row))
                if plan.rank == 0:  # a long run that is stopped has shown what it had
                    print(row_words(rows[-1], options.alone), file=sys.stderr, flush=True)
            free_memory(device)
    return rows


def _result(options: DenoiseOptions, device: torch.device, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {**describe_machine(device), "ranks": options.ranks, "alone": options.alone, "layers": options.layers, "rows": rows}


def row_words(row: dict[str, Any], alone: bool) -> str:
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
    for row in result["rows"]:
        print_split(f"{row['task']} {row['scheme']} {row['moe']} {row['cfg']} {row['launch']}", row["groups_us"])
