"""Which topology denoises a run: what the user fixed, and for the rest what was measured fastest. Pure arithmetic over a table of figures.

Rank 0 chooses once for a run, and what it has chosen travels in the arguments of the operation, so that no rank can choose otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import log

from ...parallel.plan import AttentionKind, DenoiseKind, ParallelPlan, PlanError, PlanName
from .denoise import CfgMode

BY_BRANCH: Mapping[DenoiseKind, DenoiseKind] = {"cfg": "sp", "cfg_sp": "sp"}
"""Topologies that give each branch of guidance ranks of its own, and what they are without guidance: then the same row would be computed twice."""


@dataclass(frozen=True)
class Figure:
    """Milliseconds of a step. ``attention`` None: the topology has no sequence-parallel group."""

    denoise: DenoiseKind
    attention: AttentionKind | None
    cfg: CfgMode
    ms: float


@dataclass(frozen=True)
class Measured:
    """Figures of one case, which compare with each other and with nothing else."""

    plan: PlanName
    ranks: int
    guided: bool
    image_tokens: int
    prefix: int
    figures: tuple[Figure, ...]

    def words(self) -> str:
        guided = "guided" if self.guided else "no guidance"
        return f"{self.plan} on {self.ranks} ranks, {guided}, {self.image_tokens} image and {self.prefix} prefix tokens"


def _four(prefix: int, *, cfg: float, ulysses: float, kv_gather: float, tp: float) -> Measured:
    figures = (
        Figure("cfg", None, "batched", cfg),
        Figure("sp", "ulysses", "batched", ulysses),
        Figure("sp", "kv_gather", "batched", kv_gather),
        Figure("tp", None, "batched", tp),
    )
    return Measured("hybrid", 4, True, 4096, prefix, figures)


def _two(prefix: int, batched: float, serial: float) -> Measured:
    return Measured("tp", 2, True, 4096, prefix, (Figure("tp", None, "batched", batched), Figure("tp", None, "serial", serial)))


TABLE: tuple[Measured, ...] = (
    _four(1251, cfg=120.5, ulysses=127.4, kv_gather=123.1, tp=135.1),
    _four(6290, cfg=129.3, ulysses=138.0, kv_gather=132.8, tp=145.3),
    _two(1251, batched=215.3, serial=230.6),
    _two(6290, batched=235.0, serial=253.4),
)
"""80B sizes, bf16, ``micro_major multi_micro``, H200. Four ranks, commit b260bf1: one rank alone in a CUDA graph plus its collectives at their measured
cost (``ms_per_step`` + ``left_out_ms`` of bench/results/denoise_alone_h200.json); two ranks, commit 231a3b3: bench/results/denoise_tp2_h200.json.

Other sizes are in bench/results/denoise_sizes_alone_h200.json: TP2 x CFG2 is the faster one in 13 of 15 cases, and behind by less than 1 % in the rest.
"""


@dataclass(frozen=True)
class TopologyWish:
    """What the user fixed; None leaves it to the figures."""

    denoise: DenoiseKind | None = None
    attention: AttentionKind | None = None

    @classmethod
    def of(cls, plan: ParallelPlan) -> TopologyWish:
        """As ``plan`` has it."""
        return cls(plan.denoise, plan.attention)


@dataclass(frozen=True)
class Case:
    """What a run asks for. ``guided``: as many rows of the one branch as of the other."""

    guided: bool
    image_tokens: int
    prefix: int


@dataclass(frozen=True)
class DenoiseWay:
    """How the steps of one run are done, and why; JSON in an operation's arguments."""

    denoise: DenoiseKind
    attention: AttentionKind
    cfg: CfgMode = "batched"
    reason: str = ""

    def words(self, plan: ParallelPlan) -> str:
        """For the node that draws."""
        serial = ", one branch after the other" if self.cfg == "serial" else ""
        return f"denoise {plan.denoising(self.denoise, self.attention).describe_denoise()}{serial} ({self.reason})"


def choose_way(plan: ParallelPlan, wish: TopologyWish, case: Case, *, kv_heads: int, table: tuple[Measured, ...] = TABLE) -> DenoiseWay:
    """The fastest way that ``wish`` allows over the weights of ``plan``, by the figures of the nearest case in ``table``.

    Raises:
        PlanError: the plan has no topology that the wish allows.
    """
    ways = list(_ways(plan, wish, case, kv_heads))
    if not ways:
        raise PlanError(f"denoise {wish.denoise} is no topology of plan {plan.name}; choose one of auto, {', '.join(plan.denoise_kinds)}")
    nearest = min(table, key=lambda measured: _distance(measured, plan, case))
    if len(ways) == 1:
        best, reason = ways[0], "chosen in the loader" if wish.denoise is not None else "the plan's only one"
        return DenoiseWay(best.denoise, best.attention, best.cfg, reason)
    known = [(figures, way) for way in ways if (figures := _figures(nearest, way)) is not None]
    best = min(known, key=lambda item: item[0])[1] if known else ways[0]
    return DenoiseWay(best.denoise, best.attention, best.cfg, _reason(nearest, plan, wish, case, known=bool(known)))


def _ways(plan: ParallelPlan, wish: TopologyWish, case: Case, kv_heads: int) -> Iterator[DenoiseWay]:
    """What could be chosen, the plan's own topology first."""
    for kind in sorted(plan.denoise_kinds, key=lambda kind: kind != plan.denoise):
        if wish.denoise not in (None, kind) or (wish.denoise is None and kind in BY_BRANCH and not case.guided):
            continue
        branches = case.guided and kind not in BY_BRANCH
        for attention in _attentions(plan, kind, wish, kv_heads):
            for cfg in ("batched", "serial") if branches else ("batched",):
                yield DenoiseWay(kind, attention, cfg)


def _attentions(plan: ParallelPlan, kind: DenoiseKind, wish: TopologyWish, kv_heads: int) -> list[AttentionKind]:
    kinds = [wish.attention or plan.attention, *(() if wish.attention else ("ulysses", "kv_gather"))]
    split = [attention for attention in dict.fromkeys(kinds) if plan.denoising(kind, attention).splits_heads(kv_heads)]
    return split if plan.denoising(kind, plan.attention).sp_size > 1 else split[:1]


def _figures(measured: Measured, way: DenoiseWay) -> tuple[float, float] | None:
    """To compare ways by: their figure, and where branches have ranks of their own that of how each of them shares its tokens."""

    def figure(denoise: DenoiseKind, attention: AttentionKind | None) -> float | None:
        return next((f.ms for f in measured.figures if (f.denoise, f.attention, f.cfg) == (denoise, attention, way.cfg)), None)

    shared = figure("sp", way.attention) or 0.0
    if way.denoise in BY_BRANCH:
        by_branch = figure("cfg", None)
        return None if by_branch is None else (by_branch, shared)
    own = figure(way.denoise, way.attention if way.denoise == "sp" else None)
    return None if own is None else (own, 0.0)


def _distance(measured: Measured, plan: ParallelPlan, case: Case) -> tuple[float, ...]:
    """Smaller is nearer; first what changes the work of a rank most."""
    replicas = plan.replicas > 1
    return (
        float((measured.plan in ("hybrid", "replicated")) != replicas),
        float(measured.plan != plan.name),
        abs(log(measured.ranks / plan.world_size)),
        float(measured.guided != case.guided),
        abs(log(measured.image_tokens / case.image_tokens)),
        abs(log(measured.prefix / max(case.prefix, 1))),
    )


def _reason(nearest: Measured, plan: ParallelPlan, wish: TopologyWish, case: Case, *, known: bool) -> str:
    """``auto: guided``, and what it rests on where that is another case."""
    words = f"auto: {'guided' if case.guided else 'no guidance'}"
    if wish.denoise is not None:
        words = f"{wish.denoise} chosen in the loader, the rest {words}"
    if not known:
        return f"{words}; nothing measured"
    same = (nearest.plan, nearest.ranks, nearest.guided) == (plan.name, plan.world_size, case.guided)
    if same and 0.9 < nearest.image_tokens / case.image_tokens < 1.1 and 0.5 <= nearest.prefix / max(case.prefix, 1) <= 2:
        return words
    return f"{words}; nearest measured: {nearest.words()}"
