"""Which way a run is denoised: the fastest measured one, what the user fixed, and what is said about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phase_parallel.models.hunyuan_image_3.topology_choice import TABLE, Case, DenoiseWay, Figure, Measured, TopologyWish, choose_way
from phase_parallel.parallel.plan import ParallelPlan, PlanError, make_plan

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
AUTO = TopologyWish()
HYBRID = make_plan("hybrid", world_size=4)
TEXT = 1251


def way_of(plan: ParallelPlan, wish: TopologyWish = AUTO, *, guided: bool = True, tokens: int = 4096, prefix: int = TEXT, **more: object) -> DenoiseWay:
    return choose_way(plan, wish, Case(guided, tokens, prefix), kv_heads=8, **more)


def test_guidance_gives_each_branch_its_own_ranks() -> None:
    way = way_of(HYBRID)
    assert (way.denoise, way.cfg) == ("cfg", "batched")
    assert way.words(HYBRID) == "denoise TP2×CFG2 (auto: guided)"


def test_without_guidance_the_ranks_share_the_tokens() -> None:
    """With one branch the other half of the ranks would compute the same row."""
    way = way_of(HYBRID, guided=False)
    assert (way.denoise, way.attention) == ("sp", "kv_gather")
    assert way.words(HYBRID) == (
        "denoise TP2×SP2 (kv_gather) (auto: no guidance; nearest measured: hybrid on 4 ranks, guided, 4096 image and 1251 prefix tokens)"
    )


def test_branches_are_batched_on_two_ranks() -> None:
    way = way_of(make_plan("tp", world_size=2), prefix=6290)
    assert (way.denoise, way.cfg, way.reason) == ("tp", "batched", "auto: guided")


@pytest.mark.parametrize("kv_faster", [True, False])
@pytest.mark.parametrize("guided", [True, False])
def test_the_fastest_figure_decides(kv_faster: bool, guided: bool) -> None:
    ms = {"ulysses": 20.0 if kv_faster else 10.0, "kv_gather": 10.0 if kv_faster else 20.0}
    figures = (Figure("cfg", None, "batched", 15.0), *(Figure("sp", kind, "batched", value) for kind, value in ms.items()))
    table = (Measured("hybrid", 4, guided, 4096, TEXT, figures), Measured("hybrid", 4, not guided, 4096, TEXT, ()))
    way = way_of(HYBRID, guided=guided, table=table)
    assert (way.denoise, way.attention) == ("sp", min(ms, key=ms.get))
    assert way.reason == f"auto: {'guided' if guided else 'no guidance'}"


def test_serial_guidance_is_taken_where_it_was_measured_faster() -> None:
    table = (Measured("tp", 2, True, 4096, TEXT, (Figure("tp", None, "batched", 2.0), Figure("tp", None, "serial", 1.0))),)
    plan = make_plan("tp", world_size=2)
    assert way_of(plan, table=table).cfg == "serial"
    assert way_of(plan, table=table).words(plan) == "denoise TP2, one branch after the other (auto: guided)"
    assert way_of(plan, guided=False, table=table).cfg == "batched", "one row has nothing to do in turn"


def test_the_nearest_prefix_counts() -> None:
    def measured(prefix: int, cfg: float) -> Measured:
        return Measured("hybrid", 4, True, 4096, prefix, (Figure("cfg", None, "batched", cfg), Figure("sp", "ulysses", "batched", 2.0)))

    table = (measured(1000, 1.0), measured(8000, 3.0))
    assert way_of(HYBRID, prefix=1500, table=table).denoise == "cfg"
    assert way_of(HYBRID, prefix=7000, table=table).denoise == "sp"


@pytest.mark.parametrize(
    ("tokens", "prefix", "said"),
    [(4096, TEXT, False), (4200, 2000, False), (1024, TEXT, True), (8192, TEXT, True), (4096, 200, True), (4096, 20000, True)],
)
def test_another_case_than_the_measured_one_is_said(tokens: int, prefix: int, said: bool) -> None:
    assert ("nearest measured" in way_of(HYBRID, tokens=tokens, prefix=prefix).reason) == said


def test_other_ranks_follow_the_nearest_plan_and_say_so() -> None:
    for plan in (make_plan("hybrid", world_size=8), make_plan("replicated", world_size=4)):
        way = way_of(plan)
        assert way.denoise == "cfg" and "nearest measured: hybrid on 4 ranks" in way.reason
    four = make_plan("replicated", world_size=8, storage_tp=2)
    assert (way_of(four).denoise, way_of(four).attention) == ("cfg_sp", "kv_gather")
    assert way_of(four, guided=False).denoise == "sp"


def test_what_the_user_fixed_stays() -> None:
    assert way_of(HYBRID, TopologyWish("cfg", None), guided=False) == DenoiseWay("cfg", "ulysses", "batched", "chosen in the loader")
    way = way_of(HYBRID, TopologyWish("sp", None))
    assert (way.denoise, way.attention, way.reason) == ("sp", "kv_gather", "sp chosen in the loader, the rest auto: guided")
    assert way_of(HYBRID, TopologyWish("sp", "ulysses")).attention == "ulysses"
    assert way_of(HYBRID, TopologyWish(None, "ulysses"), guided=False).attention == "ulysses"
    assert way_of(HYBRID, TopologyWish("tp", None)).denoise == "tp"
    with pytest.raises(PlanError, match="denoise cfg_sp is no topology of plan hybrid; choose one of auto, tp, sp, cfg"):
        way_of(HYBRID, TopologyWish("cfg_sp", None))


def test_heads_that_ulysses_cannot_split_leave_it_out() -> None:
    table = (Measured("hybrid", 4, True, 4096, TEXT, (Figure("sp", "ulysses", "batched", 1.0), Figure("sp", "kv_gather", "batched", 2.0))),)
    plan = make_plan("replicated", world_size=8, storage_tp=2)
    case = Case(False, 4096, TEXT)
    assert choose_way(plan, AUTO, case, kv_heads=8, table=table).attention == "ulysses"
    assert choose_way(plan, AUTO, case, kv_heads=4, table=table).attention == "kv_gather"


SCHEMES = {
    ("cfg", None): "hybrid4-cfg",
    ("sp", "ulysses"): "hybrid4-ulysses",
    ("sp", "kv_gather"): "hybrid4-kv_gather",
    ("tp", None): "hybrid4-tp",
}


@pytest.mark.parametrize("measured", TABLE, ids=Measured.words)
def test_figures_are_those_of_the_results(measured: Measured) -> None:
    """The fastest launch of the default experts; other rows of a file are other ways to compute them."""
    file = {4: "denoise_alone_h200.json", 2: "denoise_tp2_h200.json"}[measured.ranks]
    rows = json.loads((RESULTS / file).read_text())["rows"]
    assert measured.guided
    for figure in measured.figures:
        scheme = SCHEMES[figure.denoise, figure.attention] if measured.ranks == 4 else "tp2"
        case = (scheme, figure.cfg, measured.prefix, measured.image_tokens)
        same = [row for row in rows if (row["scheme"], row.get("cfg"), row["prefix"], row.get("image_tokens")) == case]
        usual = [row for row in same if row["moe"] in ("micro_major multi_micro, triton", "micro shard, triton", "one piece, triton")]
        assert figure.ms == pytest.approx(min(row["ms_per_step"]["median"] + row["left_out_ms"] for row in usual), abs=0.051)
