"""The engine on four real ranks: equal results, phase switches that cost nothing, and a rank whose input differs by one token."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from engines import engine_of
from rank_pool import RankPool, Reply
from thread_world import run_ranks

from phase_parallel.models.hunyuan_image_3.engine import ImageRequest
from phase_parallel.models.hunyuan_image_3.sequence import build_image_rows
from phase_parallel.models.hunyuan_image_3.topology_choice import Case, TopologyWish, choose_way
from phase_parallel.parallel.plan import make_plan

pytestmark = pytest.mark.ranks4
HERE = Path(__file__).parent
PLANS = {
    "ulysses": dict(name="hybrid"),
    "kv_gather": dict(name="hybrid", attention="kv_gather"),
    "cfg": dict(name="hybrid", denoise="cfg"),
    "tp": dict(name="tp"),
    "replicated": dict(name="replicated"),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    helpers = os.pathsep.join([str(HERE.parent / "parallel"), os.environ.get("PYTHONPATH", "")])
    pool = RankPool(HERE / "engine_program.py", 4, lambda rank, store: {"PYTHONPATH": helpers})
    yield pool
    pool.close()


def succeed(replies: list[Reply]) -> list[dict]:
    assert [reply.error for reply in replies] == [""] * 4
    return [reply.result for reply in replies]


@pytest.fixture(scope="module")
def alone(eight_ways: Path) -> torch.Tensor:
    """The first values of the same picture on one rank."""

    def body(plan: object, comm: object) -> torch.Tensor:
        engine = engine_of(eight_ways, plan, comm)
        height, width = engine.table.size(12)
        rows = build_image_rows(
            engine.tokenizer,
            engine.config,
            prompt="a red kite",
            system_prompt=None,
            cot_text=None,
            cond_images=(),
            height=height,
            width=width,
        )
        return engine.sample(ImageRequest(rows, steps=2, guidance=4.0, flow_shift=3.0, seeds=(5,))).flatten()[:8]

    return run_ranks(body, "single", world_size=1)[0]


@pytest.mark.parametrize("plan", PLANS)
def test_all_ranks_draw_the_picture_of_one_rank(ranks: RankPool, eight_ways: Path, alone: torch.Tensor, plan: str) -> None:
    results = succeed(ranks.run("picture", folder=str(eight_ways), plan=PLANS[plan], timeout_s=120.0))
    assert len({result["digest"] for result in results}) == 1
    assert torch.allclose(torch.tensor(results[0]["latent"]), alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("plan", ["ulysses", "cfg"])
def test_phase_switches_move_no_weight_and_make_no_group(ranks: RankPool, eight_ways: Path, plan: str) -> None:
    for result in succeed(ranks.run("phases", folder=str(eight_ways), plan=PLANS[plan], timeout_s=240.0)):
        assert not result["moved"]
        assert (result["groups"], result["generation"]) == (0, 0)
        assert len(set(result["digests"])) == 1, "the same request gives the same bits again"


def test_guided_and_plain_runs_by_turns_are_those_of_fixed_plans(ranks: RankPool, eight_ways: Path) -> None:
    """What `auto` asks for with guidance on, off and on again: no weight is read twice, no group is made, and no bit differs."""

    def draw(runs: list[dict[str, object]], **plan: str) -> list[dict]:
        return succeed(ranks.run("ways", folder=str(eight_ways), plan={"name": "hybrid", **plan}, runs=runs, timeout_s=240.0))

    guided, plain = (
        {"guidance": scale, "way": asdict(choose_way(make_plan("hybrid", world_size=4), TopologyWish(), Case(scale > 1, 4096, 1251), kv_heads=8))}
        for scale in (4.0, 1.0)
    )
    (branches,) = draw([{"guidance": 4.0}], denoise="cfg")[0]["digests"]
    (tokens,) = draw([{"guidance": 1.0}], attention="kv_gather")[0]["digests"]
    results = draw([guided, plain, guided])
    for result in results:
        assert result["digests"] == [branches, tokens, branches]
        assert result["loads"] == 1 and result["generation"] == results[0]["generation"]
        assert set(result["groups"]) == {"TP", "CFG"}, "the Ranks node shows the last run's groups"
    assert [words.split(";")[0] for words in results[0]["told"]] == [
        "denoise TP2×CFG2 (auto: guided)", "denoise TP2×SP2 (kv_gather) (auto: no guidance", "denoise TP2×CFG2 (auto: guided)"
    ]  # fmt: skip


def test_a_way_that_the_plan_has_not_is_refused_on_every_rank(ranks: RankPool, eight_ways: Path) -> None:
    way = {"denoise": "cfg_sp", "attention": "ulysses"}
    replies = ranks.run("ways", folder=str(eight_ways), plan={"name": "hybrid"}, runs=[{"guidance": 4.0, "way": way}], timeout_s=120.0)
    assert all("denoise cfg_sp needs 4, 6 … replicas but there are 2" in reply.error for reply in replies)


@pytest.mark.parametrize(("mistake", "phase"), [("odd_token", "denoise"), ("odd_text", "prefill")])
def test_one_token_off_on_one_rank_stops_every_rank(ranks: RankPool, eight_ways: Path, mistake: str, phase: str) -> None:
    """Even when the section's key says that the inputs are equal: the ledger knows the tokens."""
    replies = ranks.run("picture", folder=str(eight_ways), plan=PLANS["ulysses"], timeout_s=120.0, **{mistake: 3})
    assert {reply.error_type for reply in replies} == {"CollectiveDivergence"}
    assert len({reply.error for reply in replies}) == 1
    assert f"most ranks made `{phase} takes row " in replies[0].error and f"but rank 3 made `{phase} takes row " in replies[0].error
    succeed(ranks.run("picture", folder=str(eight_ways), plan=PLANS["ulysses"], timeout_s=120.0))


@pytest.mark.parametrize("height", [1, 7])
@pytest.mark.parametrize("plan", ["ulysses", "replicated"])
def test_all_ranks_share_the_autoencoder(ranks: RankPool, eight_ways: Path, plan: str, height: int) -> None:
    results = succeed(ranks.run("autoencoder", folder=str(eight_ways), plan=PLANS[plan], height=height, timeout_s=120.0))
    assert all(result == results[0] for result in results)

    def body(plan: object, comm: object) -> tuple[torch.Tensor, torch.Tensor]:
        engine = engine_of(eight_ways, plan, comm)
        latent = torch.randn(1, engine.config.vae.latent_channels, height, 2, generator=torch.Generator().manual_seed(1))
        pixels = engine.vae_decode(latent)
        return pixels.flatten(), engine.vae_encode(pixels.clamp(-1, 1))[0].flatten()

    pixels, mean = run_ranks(body, "single", world_size=1)[0]
    for name, alone in (("pixels", pixels), ("mean", mean)):
        assert (torch.tensor(results[0][name]) - alone).abs().max() <= 1e-5 * alone.abs().max(), name


def test_a_cancel_stops_the_autoencoder_on_every_rank_and_the_next_picture_comes(ranks: RankPool, eight_ways: Path) -> None:
    call = dict(folder=str(eight_ways), plan=PLANS["ulysses"], height=5, timeout_s=120.0)
    replies = ranks.run("autoencoder", cancel_at=4, **call)
    assert {reply.error_type for reply in replies} == {"SectionCancelled"}
    assert len({reply.error for reply in replies}) == 1 and "cancelled after 4 of " in replies[0].error
    succeed(ranks.run("autoencoder", **call))
