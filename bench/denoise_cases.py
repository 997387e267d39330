"""What ``phase-parallel bench denoise`` measures: plans, ways to compute the experts, ways of guidance, and the sizes of pictures and prefixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ..kernels.kernel_set import MoeBackend
from ..kernels.moe import MoeLayout, MoePath
from ..models.hunyuan_image_3.denoise import CfgMode
from ..models.reduction import ReductionChoice
from ..parallel.plan import AttentionKind, DenoiseKind, ParallelPlan, PlanName, make_plan
from .ar import Task, choose_tasks
from .denoise import Size
from .errors import BenchError

Experts = Literal[MoeBackend, "grouped_mm"]
"""Who computes the routed experts: as the loader knows it, or PyTorch's grouped product, which only this table knows."""
EXPERTS: tuple[Experts, ...] = (*get_args(MoeBackend), "grouped_mm")


@dataclass(frozen=True)
class Scheme:
    name: str
    plan: PlanName
    ranks: int
    denoise: DenoiseKind
    attention: AttentionKind = "ulysses"
    usual: bool = True
    """Whether it is measured where no scheme is named."""

    def on(self, rank: int) -> ParallelPlan:
        return make_plan(self.plan, world_size=self.ranks, rank=rank, denoise=self.denoise, attention=self.attention)


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("hybrid4-cfg", "hybrid", 4, "cfg"),
        Scheme("hybrid4-ulysses", "hybrid", 4, "sp"),
        Scheme("hybrid4-kv_gather", "hybrid", 4, "sp", "kv_gather"),
        Scheme("hybrid4-tp", "hybrid", 4, "tp"),
        Scheme("tp4", "tp", 4, "tp"),
        # TP2 x SP2 from the first token to the last, as others have it: what does not change between the phases, to compare with.
        Scheme("replicated4-ulysses", "replicated", 4, "sp", usual=False),
        Scheme("tp2", "tp", 2, "tp"),
        Scheme("single", "single", 1, "tp"),
    )
}

MOE_TABLE: tuple[tuple[MoeLayout, MoePath, Experts], ...] = (
    ("micro_major", "multi_micro", "auto"),
    ("micro_major", "two_dispatch", "auto"),
    ("micro_major", "two_dispatch", "flashinfer"),
    ("micro_major", "multi_micro", "flashinfer"),
    ("micro_major", "two_dispatch", "grouped_mm"),
    ("expert_major", "multi_micro", "auto"),
)
"""The rows that compare ways to compute the experts."""

PREFIXES = (1000, 2000, 4000, 6000, 10000)
PICTURES: tuple[Size, ...] = ((512, 512), (1024, 1024), (1024, 2048))
"""Height and width."""
SHRUNK = 8
"""Sides of pictures and prefixes of toy sizes are shorter by that, and by twice that."""


@dataclass(frozen=True)
class DenoiseOptions:
    """``schemes`` by name, all of ``ranks`` ranks unless ``alone``, when one process plays one rank of each. Empty choices mean all of them, and of
    ``experts`` the usual ones. ``moe_table``: the rows of :data:`MOE_TABLE` instead of these choices. ``sizes``: pictures and prefixes of many sizes
    instead of the tasks."""

    schemes: tuple[str, ...]
    ranks: int
    alone: bool
    tasks: tuple[str, ...]
    cfg: tuple[CfgMode, ...]
    layouts: tuple[MoeLayout, ...]
    paths: tuple[MoePath, ...]
    experts: tuple[Experts, ...]
    moe_table: bool
    sizes: bool
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
    experts: Experts
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
    return tuple(names) or tuple(name for name in fitting if SCHEMES[name].usual)


def cases(options: DenoiseOptions) -> list[Case]:
    """Cases whose weights are the same follow each other. What would be the same run twice is left out: a shard in one piece has one layout and one
    path, and a rank with one branch has nothing to batch.

    Raises:
        BenchError: no case is left.
    """
    found = list(dict.fromkeys(_cases(options)))
    if not found:
        raise BenchError("nothing is left to measure: expert_major knows neither two_dispatch nor flashinfer; leave one of these choices out.")
    return found


def _cases(options: DenoiseOptions) -> Iterator[Case]:
    ways = MOE_TABLE if options.moe_table else tuple(_ways(options))
    for layout in ("micro_major", "expert_major"):
        for name in options.schemes:
            scheme = SCHEMES[name]
            plan = scheme.on(0)
            # Only where a rank denoises with several micro shards do layout and path differ.
            pieces = plan.micro_count if plan.topology("denoise").micro is None else 1
            for way, path, experts in ways:
                if plan.micro_count == 1:
                    way = "micro_major"
                if way != layout:
                    continue
                path = path if pieces > 1 else "multi_micro"
                plain = experts == "auto" and (layout, path) == ("micro_major", "multi_micro") and not options.sizes and not options.moe_table
                modes = options.cfg or (("batched", "serial") if plain else ("batched",))
                yield Case(scheme, layout, path, experts, ("batched",) if plan.cfg_size > 1 else tuple(modes))


def _ways(options: DenoiseOptions) -> Iterator[tuple[MoeLayout, MoePath, Experts]]:
    usual = options.sizes  # many sizes of the one way that is the default
    for layout in options.layouts or (("micro_major",) if usual else ("micro_major", "expert_major")):
        for path in options.paths or (("multi_micro",) if usual else ("multi_micro", "two_dispatch")):
            for experts in options.experts or ("auto",):
                if layout == "micro_major" or (path == "multi_micro" and experts != "flashinfer"):
                    yield layout, path, experts


def pictures(options: DenoiseOptions) -> list[tuple[Task, Size | None]]:
    """Prefixes and pictures to measure each case with; a size of None is the model's own."""
    if not options.sizes:
        return [(task, None) for task in choose_tasks(options.tasks, small=options.small)]
    shrunk = SHRUNK if options.small else 1
    prefixes = [prefix // (2 * SHRUNK if options.small else 1) for prefix in PREFIXES]
    return [(Task("sizes", 0, prefix), (height // shrunk, width // shrunk)) for height, width in PICTURES for prefix in prefixes]
