"""Prefill, decode and denoise with their caches against one dense pass over the whole row, under plans of one to eight ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dense_reference import DenseTrunk
from engines import engine_of
from specs import ALL_PLANS
from thread_world import run_ranks

from phase_parallel.models.hunyuan_image_3.engine import Engine
from phase_parallel.models.hunyuan_image_3.model import MAX_TABLES, BlockRow, HunyuanImage3Model, StepInputs
from phase_parallel.models.hunyuan_image_3.sequence import build_image_rows
from phase_parallel.models.hunyuan_image_3.token_row import CondSpan, TokenRow
from phase_parallel.parallel.collectives import Communicator
from phase_parallel.parallel.plan import ParallelPlan

PLANS = ["single", "tp2", "hybrid4-ulysses", "hybrid4-kv_gather", "hybrid4-cfg", "hybrid8-s2-cfg_sp", "hybrid8-s4-ulysses"]
EVERYWHERE = frozenset({0, 1})
TOKENS = (5, 17, 3, 44, 101, 17, 9, 9, 63, 2, 120)


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).abs().max() / wanted.abs().max())


def image_row(engine: Engine) -> TokenRow:
    return build_image_rows(
        engine.tokenizer,
        engine.config,
        prompt="a kite over the sea",
        system_prompt=None,
        cot_text=None,
        cond_images=(),
        height=128,
        width=432,
    ).cond


@pytest.fixture(scope="module")
def dense(eight_ways: Path) -> DenseTrunk:
    return DenseTrunk(eight_ways)


def dense_velocity(dense: DenseTrunk, model: HunyuanImage3Model, row: TokenRow, latents: torch.Tensor, step: StepInputs) -> torch.Tensor:
    """Prefix and block in one pass; the modules around the trunk are the model's own (they have golden numbers)."""
    around, (start, stop) = model.around, (row.gen.timestep_index, row.gen.image[1])
    with torch.inference_mode():
        t = torch.tensor([step.timestep])
        hidden = dense.embed(row.tokens).clone()
        hidden[start] = around.timestep_emb(t)[0].double()
        hidden[start + 1 : stop] = around.patch_embed(latents, around.time_embed(t))[0].double()
        out = dense.forward(hidden, row)[start + 1 : stop]
        return around.final_layer(out.float().unsqueeze(0), around.time_embed_2(t), *latents.shape[-2:]).double()


@pytest.mark.parametrize("name", PLANS)
def test_later_step_equals_a_full_pass(name: str, eight_ways: Path, dense: DenseTrunk) -> None:
    """The second step overwrites the first one's block behind the prefix (spec section 10, item 7)."""

    def body(plan: ParallelPlan, comm: Communicator) -> None:
        engine = engine_of(eight_ways, plan, comm)
        model, row = engine.model, image_row(engine)
        first, second = torch.randn(2, 1, model.config.vae.latent_channels, 8, 27, generator=torch.Generator().manual_seed(1))
        cache = engine.prefixes.prepare(row, (), EVERYWHERE).cache
        for latents, step in ((first, StepInputs(1000.0)), (second, StepInputs(642.857))):
            got = model.denoise([BlockRow(row, cache, 0)], latents, step)
            if plan.rank == 0:
                assert relative(got, dense_velocity(dense, model, row, latents, step)) < 1e-5

    run_ranks(body, **ALL_PLANS[name])


@pytest.mark.parametrize("name", PLANS)
def test_rows_of_other_lengths_in_one_call(name: str, eight_ways: Path, dense: DenseTrunk) -> None:
    """Two rows with prefixes of other lengths and two pictures each, as a host may batch them; both pictures of a row share its cache."""

    def body(plan: ParallelPlan, comm: Communicator) -> None:
        engine = engine_of(eight_ways, plan, comm)
        model, long = engine.model, image_row(engine)
        short = build_image_rows(
            engine.tokenizer, engine.config, prompt="a", system_prompt=None, cot_text=None, cond_images=(), height=128, width=432
        ).cond
        assert short.prefix_length < long.prefix_length
        latents = torch.randn(2, model.config.vae.latent_channels, 8, 27, generator=torch.Generator().manual_seed(2))
        caches = {row: engine.prefixes.prepare(row, (), EVERYWHERE).cache for row in (long, short)}
        order = [(long, 0), (short, 0), (long, 1), (short, 1)]
        got = model.denoise([BlockRow(row, caches[row], number) for row, number in order], latents, StepInputs(500.0))
        if plan.rank == 0:
            for velocity, (row, number) in zip(got, order, strict=True):
                wanted = dense_velocity(dense, model, row, latents[number : number + 1], StepInputs(500.0))[0]
                assert relative(velocity, wanted) < 1e-5

    run_ranks(body, **ALL_PLANS[name])


@pytest.mark.parametrize("name", ["single", "tp4", "tp8", "hybrid4-ulysses", "hybrid8-s2-ulysses", "hybrid8-s4-cfg"])
@pytest.mark.parametrize("cut", [1, 4, 10])
def test_prefill_in_parts_and_decode_equal_a_full_pass(name: str, cut: int, eight_ways: Path, dense: DenseTrunk) -> None:
    """Prefill of the first tokens, prefill of a second part behind them, then single tokens."""
    wanted = dense.logits(dense.forward(dense.embed(TOKENS), TokenRow(TOKENS, (), None)))

    def body(plan: ParallelPlan, comm: Communicator) -> None:
        model = engine_of(eight_ways, plan, comm).model
        row, middle = TokenRow(TOKENS[:-2], (), None), min(cut, len(TOKENS) - 3)
        cache = model.new_cache(len(TOKENS), "prefill")
        parts = [model.prefill(row, 0, middle, cache), model.prefill(row, middle, len(row), cache)]
        got = [model.next_logits(torch.cat(parts), "prefill")]
        for position in (len(TOKENS) - 2, len(TOKENS) - 1):
            got.append(model.decode(TOKENS[position], position, cache).unsqueeze(0))
        assert cache.length == len(TOKENS)
        assert relative(torch.cat(got), wanted) < 1e-5

    run_ranks(body, **ALL_PLANS[name])


def test_every_rank_sees_the_whole_vocabulary_in_order(eight_ways: Path) -> None:
    def body(plan: ParallelPlan, comm: Communicator) -> torch.Tensor:
        model = engine_of(eight_ways, plan, comm).model
        row = TokenRow(TOKENS, (), None)
        return model.next_logits(model.prefill(row, 0, len(row), model.new_cache(len(row), "prefill"))[-1:], "prefill")[0]

    got = run_ranks(body, **ALL_PLANS["hybrid8-s2-ulysses"])
    assert got[0].shape == (192,) and all(torch.equal(logits, got[0]) for logits in got)


def test_a_picture_is_embedded_once_for_all_prefills(eight_ways: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = run_ranks(lambda plan, comm: engine_of(eight_ways, plan, comm), "single", world_size=1)[0].model
    generator = torch.Generator().manual_seed(3)
    hidden = model.config.hidden_size
    latent, vit = (torch.randn(*shape, generator=generator) for shape in ((model.config.vae.latent_channels, 2, 3), (4, hidden)))
    row = TokenRow((1, 2, *[5] * 13), (CondSpan(2, (3, 9), (2, 3), (10, 14), (1, 3)),), None)
    features = model.reference_features(latent, vit, "picture")
    with torch.inference_mode():
        zero = torch.zeros(1)
        wanted = torch.cat([model.around.timestep_emb(zero), model.around.patch_embed(latent.unsqueeze(0), model.around.time_embed(zero))[0]])
    with monkeypatch.context() as patch:
        patch.setattr(model.around.patch_embed, "forward", None)
        patch.setattr(model.around.timestep_emb, "forward", None)
        first, again = (model.prefill(row, 0, 15, model.new_cache(15, "prefill"), [features]) for _ in range(2))
    assert torch.equal(first, again)
    filled = torch.zeros(15, hidden)
    model._insert_references(filled, row, 0, 15, [features])
    assert torch.equal(filled[2:9], wanted) and torch.equal(filled[10:14], vit)
    assert not filled[[0, 1, 9, 14]].any()


def test_rotary_tables_of_a_row_are_kept_for_a_while(eight_ways: Path) -> None:
    model = run_ranks(lambda plan, comm: engine_of(eight_ways, plan, comm), "single", world_size=1)[0].model
    rows = [TokenRow((number, *TOKENS), (), None) for number in range(MAX_TABLES + 1)]
    first = model.tables(rows[0], 0, 4)
    assert model.tables(TokenRow((0, *TOKENS), (), None), 0, 4) is first
    assert torch.equal(model.tables(rows[0], 1, 5)[0][:3], first[0][1:])
    for row in rows[1:]:
        model.tables(row, 0, 4)
    assert model.tables(rows[0], 0, 4) is not first


class TestRefusals:
    def engine(self, folder: Path) -> Engine:
        return run_ranks(lambda plan, comm: engine_of(folder, plan, comm), "single", world_size=1)[0]

    def test_latent_of_another_size(self, eight_ways: Path) -> None:
        engine = self.engine(eight_ways)
        row = image_row(engine)
        cache = engine.prefixes.prepare(row, (), EVERYWHERE).cache
        with pytest.raises(ValueError, match="a latent with 257 block tokens does not belong to a row with 217"):
            engine.model.denoise([BlockRow(row, cache, 0)], torch.zeros(1, 4, 16, 16), StepInputs(1000.0))

    def test_pictures_that_were_not_given(self, eight_ways: Path) -> None:
        engine = self.engine(eight_ways)
        row = image_row(engine)
        with pytest.raises(ValueError, match="the row has 0 conditioning pictures but 1 were given"):
            engine.model.prefill(row, 0, 4, engine.model.new_cache(8, "prefill"), [object()])

    def test_row_longer_than_the_cache(self, eight_ways: Path) -> None:
        model = self.engine(eight_ways).model
        with pytest.raises(ValueError, match="position 11 does not fit a KV cache of 8 positions"):
            model.prefill(TokenRow(TOKENS, (), None), 0, len(TOKENS), model.new_cache(8, "prefill"))
