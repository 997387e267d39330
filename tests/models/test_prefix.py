"""Text keys and values that go on in denoise: what is reused, when, and that it changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import engine_of
from specs import ALL_PLANS
from thread_world import run_ranks

from phase_parallel.models.hunyuan_image_3.engine import Engine, ImageRequest
from phase_parallel.models.hunyuan_image_3.model import BlockRow, StepInputs
from phase_parallel.models.hunyuan_image_3.prefix import MAX_ROWS
from phase_parallel.models.hunyuan_image_3.sequence import ImageRows, build_image_rows
from phase_parallel.models.hunyuan_image_3.text_generation import TextRequest
from phase_parallel.parallel.collectives import Communicator
from phase_parallel.parallel.plan import ParallelPlan

PROMPT = "a lamp"
EVERY_BRANCH = {True: frozenset({0, 1}), False: frozenset({0})}


def write_text(engine: Engine, prompt: str = PROMPT) -> None:
    engine.generate_text(TextRequest(prompt, None, None, "img_ratio", need_ratio=True, max_new_tokens=1))


def rows_of(engine: Engine, *, prompt: str = PROMPT, height: int = 256, width: int = 256) -> ImageRows:
    return build_image_rows(
        engine.tokenizer, engine.config, prompt=prompt, system_prompt=None, cot_text=None, cond_images=(), height=height, width=width
    )


def everywhere(engine: Engine) -> frozenset[int]:
    return EVERY_BRANCH[engine.model.plan.cfg_size == 2]


@pytest.mark.parametrize("name", ["single", "tp4", "hybrid4-ulysses", "hybrid4-kv_gather", "hybrid4-cfg", "hybrid8-s2-cfg_sp"])
def test_reused_and_computed_prefixes_are_equal(name: str, eight_ways: Path) -> None:
    def body(plan: ParallelPlan, comm: Communicator) -> tuple[int, int, torch.Tensor, torch.Tensor]:
        found = []
        for reuse in (True, False):
            engine = engine_of(eight_ways, plan, comm, reuse_text=reuse)
            write_text(engine)
            row = rows_of(engine).cond
            record = engine.prefixes.prepare(row, (), everywhere(engine))
            found.append((record.reused, record.cache.k[:, : row.prefix_length], row.prefix_length))
        return found[0][0], found[0][2], found[0][1], found[1][1]

    for reused, prefix, with_text, computed in run_ranks(body, **ALL_PLANS[name]):
        assert 0 < reused < prefix
        assert (with_text - computed).abs().max() <= 1e-5 * computed.abs().max()


def test_ulysses_goes_on_in_the_texts_own_cache(eight_ways: Path) -> None:
    """The KV heads a rank owns in AR TP4 are those it attends with after Ulysses: nothing is copied, nothing is communicated."""

    def body(plan: ParallelPlan, comm: Communicator) -> None:
        engine = engine_of(eight_ways, plan, comm)
        write_text(engine)
        text = engine.prefixes._text.cache
        first = engine.prefixes.prepare(rows_of(engine).cond, (), frozenset({0}))
        assert first.cache is text
        assert comm.ledger.counts["kv_gather"] == 0
        other = engine.prefixes.prepare(rows_of(engine, height=128, width=432).cond, (), frozenset({0}))
        assert other.cache is not text and other.reused == first.reused, "a second row shares the text by a copy"

    run_ranks(body, "hybrid", world_size=4)


def test_rows_share_what_they_begin_with(eight_ways: Path) -> None:
    """Another prompt shares the tokens up to its first difference, and so does the unconditional row; both give what a full prefill gives."""

    def body(plan: ParallelPlan, comm: Communicator) -> None:
        engine, plain = engine_of(eight_ways, plan, comm), engine_of(eight_ways, plan, comm, reuse_text=False)
        write_text(engine)
        whole = rows_of(engine).cond
        for row in (rows_of(engine, prompt="a lamb").cond, rows_of(engine).uncond, whole, rows_of(engine, prompt="a lark").cond):
            expected = next(i for i, (a, b) in enumerate(zip((*whole.tokens, -1), row.tokens, strict=False)) if a != b) if row is not whole else None
            record = engine.prefixes.prepare(row, (), frozenset({0}))
            fresh = plain.prefixes.prepare(row, (), frozenset({0}))
            assert fresh.reused == 0
            assert record.reused == (expected if expected is not None else len(engine.prefixes._text.tokens))
            got, want = (r.cache.k[:, : row.prefix_length] for r in (record, fresh))
            assert (got - want).abs().max() <= 1e-5 * want.abs().max()

    run_ranks(body, "tp", world_size=2)


def test_known_tokens_tell_what_prepare_will_reuse(eight_ways: Path) -> None:
    def body(plan: ParallelPlan, comm: Communicator) -> None:
        engine = engine_of(eight_ways, plan, comm)
        row = rows_of(engine).cond
        assert engine.prefixes.known_tokens(row, ()) == 0
        write_text(engine)
        known = engine.prefixes.known_tokens(row, ())
        assert known == engine.prefixes.prepare(row, (), frozenset({0})).reused > 0
        assert engine.prefixes.known_tokens(row, ()) == row.prefix_length

    run_ranks(body, "single", world_size=1)


def test_only_the_branch_that_needs_a_row_keeps_its_heads(eight_ways: Path) -> None:
    def body(plan: ParallelPlan, comm: Communicator) -> None:
        engine = engine_of(eight_ways, plan, comm)
        rows = rows_of(engine)
        mine = plan.topology("denoise").cfg_rank
        for branch, row in ((0, rows.cond), (1, rows.uncond)):
            record = engine.prefixes.prepare(row, (), frozenset({branch}))
            assert (record.cache is not None) == (branch == mine)
        again = engine.prefixes.prepare(rows.cond, (), frozenset({0, 1}))
        assert again.cache is not None, "cfg 1 needs the conditional row on every rank"

    run_ranks(body, "hybrid", world_size=4, denoise="cfg")


def test_a_kept_prefix_is_not_computed_again_and_old_ones_are_dropped(eight_ways: Path) -> None:
    def body(plan: ParallelPlan, comm: Communicator) -> None:
        engine = engine_of(eight_ways, plan, comm)
        row = rows_of(engine).cond
        first = engine.prefixes.prepare(row, (), frozenset({0}))
        made = comm.ledger.counts.total()
        assert engine.prefixes.prepare(row, (), frozenset({0})) is first
        assert comm.ledger.counts.total() == made
        for number in range(MAX_ROWS):
            engine.prefixes.prepare(rows_of(engine, prompt=f"{number}").cond, (), frozenset({0}))
        assert engine.prefixes.prepare(row, (), frozenset({0})) is not first

    run_ranks(body, "single", world_size=1)


def test_later_steps_equal_a_full_recompute(eight_ways: Path) -> None:
    """Overwriting the block behind the prefix is exact (spec section 10, item 7): stale keys of the first step are never seen."""

    def body(plan: ParallelPlan, comm: Communicator) -> None:
        engine = engine_of(eight_ways, plan, comm)
        row = rows_of(engine).cond
        generator = torch.Generator().manual_seed(7)
        first, second = torch.randn(2, 1, engine.config.vae.latent_channels, 16, 16, generator=generator)
        kept = engine.prefixes.prepare(row, (), frozenset({0})).cache
        engine.model.denoise([BlockRow(row, kept, 0)], first, StepInputs(1000.0))
        later = engine.model.denoise([BlockRow(row, kept, 0)], second, StepInputs(700.0))
        engine.prefixes.clear()
        fresh = engine.prefixes.prepare(row, (), frozenset({0})).cache
        again = engine.model.denoise([BlockRow(row, fresh, 0)], second, StepInputs(700.0))
        assert torch.equal(later, again)

    run_ranks(body, "hybrid", world_size=4)


@pytest.mark.parametrize("name", ["single", "tp4", "hybrid4-ulysses", "hybrid4-kv_gather", "hybrid4-cfg", "hybrid8-s2-cfg_sp"])
def test_reuse_changes_no_picture(name: str, eight_ways: Path) -> None:
    def body(plan: ParallelPlan, comm: Communicator) -> list[torch.Tensor]:
        found = []
        for reuse in (True, False):
            engine = engine_of(eight_ways, plan, comm, reuse_text=reuse)
            write_text(engine)
            rows = rows_of(engine)
            request = ImageRequest(rows, steps=2, guidance=5.0, flow_shift=3.0, seeds=(1,))
            found.append(engine.sample(request))
        return found

    for reused, computed in run_ranks(body, **ALL_PLANS[name]):
        assert (reused - computed).abs().max() <= 1e-5 * computed.abs().max()


@pytest.mark.parametrize("position", [0, 3, -1])
def test_nothing_is_reused_from_a_differing_token_on(position: int, eight_ways: Path) -> None:
    """Exact tokens, wherever the difference is; one token less is still a prefix."""

    def body(plan: ParallelPlan, comm: Communicator) -> None:
        engine = engine_of(eight_ways, plan, comm)
        write_text(engine)
        row, text = rows_of(engine).cond, engine.prefixes._text
        tokens = list(text.tokens)
        tokens[position] += 1
        engine.prefixes._text = replace(text, tokens=tuple(tokens))
        record = engine.prefixes.prepare(row, (), frozenset({0}))
        assert record.reused == position % len(tokens)
        assert record.cache is not text.cache
        engine.prefixes.clear()
        engine.prefixes._text = replace(text, tokens=text.tokens[:-1])
        assert engine.prefixes.prepare(row, (), frozenset({0})).reused == len(text.tokens) - 1

    run_ranks(body, "single", world_size=1)


def test_text_that_reaches_into_the_picture_is_reused_up_to_it(eight_ways: Path) -> None:
    def body(plan: ParallelPlan, comm: Communicator) -> None:
        engine = engine_of(eight_ways, plan, comm)
        write_text(engine)
        row, text = rows_of(engine).cond, engine.prefixes._text
        engine.prefixes._text = replace(text, tokens=row.tokens[: row.prefix_length + 1])
        record = engine.prefixes.prepare(row, (), frozenset({0}))
        assert record.reused == row.prefix_length
        assert record.cache is not text.cache

    run_ranks(body, "single", world_size=1)


def test_pictures_must_be_the_same_ones(eight_ways: Path) -> None:
    def body(plan: ParallelPlan, comm: Communicator) -> None:
        engine = engine_of(eight_ways, plan, comm)
        write_text(engine)
        engine.prefixes._text = replace(engine.prefixes._text, features=("another picture",))
        assert engine.prefixes.prepare(rows_of(engine).cond, (), frozenset({0})).reused == 0

    run_ranks(body, "single", world_size=1)


def test_cache_that_is_too_short_is_copied(eight_ways: Path) -> None:
    """A text cache without room for the picture: its keys and values are still used."""

    def body(plan: ParallelPlan, comm: Communicator) -> None:
        engine = engine_of(eight_ways, plan, comm)
        write_text(engine)
        row, text = rows_of(engine).cond, engine.prefixes._text
        short = engine.model.new_cache(len(text.tokens), "prefill")
        short.copy_prefix(text.cache, len(text.tokens))
        engine.prefixes._text = replace(text, cache=short)
        record = engine.prefixes.prepare(row, (), frozenset({0}))
        assert record.reused == len(text.tokens) and record.cache is not short and record.cache.capacity >= row.gen.image[1]

    run_ranks(body, "single", world_size=1)


@pytest.mark.parametrize("name", ["single", "hybrid4-ulysses", "hybrid4-cfg"])
def test_second_row_of_one_text_is_right_after_the_first_has_drawn(name: str, eight_ways: Path) -> None:
    """The first row's picture lies behind the shared tokens in the text's cache when the second row copies them."""

    def body(plan: ParallelPlan, comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        engine = engine_of(eight_ways, plan, comm)
        write_text(engine)
        for height, width in ((256, 256), (128, 432)):
            rows = rows_of(engine, height=height, width=width)
            latent = engine.sample(ImageRequest(rows, steps=2, guidance=5.0, flow_shift=3.0, seeds=(1,)))
        engine.prefixes.clear()
        return latent, engine.sample(ImageRequest(rows, steps=2, guidance=5.0, flow_shift=3.0, seeds=(1,)))

    for after, fresh in run_ranks(body, **ALL_PLANS[name]):
        assert (after - fresh).abs().max() <= 1e-5 * fresh.abs().max()


def test_bytes_count_a_shared_cache_once(eight_ways: Path) -> None:
    def body(plan: ParallelPlan, comm: Communicator) -> None:
        engine = engine_of(eight_ways, plan, comm)
        assert engine.prefixes.nbytes == 0
        write_text(engine)
        text = engine.prefixes._text.cache.nbytes
        engine.prefixes.prepare(rows_of(engine).cond, (), frozenset({0}))
        assert engine.prefixes.nbytes == text
        engine.prefixes.prepare(rows_of(engine).uncond, (), frozenset({0}))
        assert engine.prefixes.nbytes > text
        engine.prefixes.clear()
        assert engine.prefixes.nbytes == 0

    run_ranks(body, "single", world_size=1)
