"""Text on all ranks: the same tokens everywhere, the limits, what is reported and when, and what stays for denoise."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import engine_of
from specs import ALL_PLANS
from thread_world import run_ranks

from phase_parallel.models.hunyuan_image_3.engine import Engine
from phase_parallel.models.hunyuan_image_3.sequence import build_image_rows
from phase_parallel.models.hunyuan_image_3.text_generation import TOKENS_PER_CHECK, Sampling, TextRequest, TextResult
from phase_parallel.models.hunyuan_image_3.text_rules import TextStageError
from phase_parallel.models.hunyuan_image_3.token_row import SequenceError
from phase_parallel.parallel.collectives import Communicator
from phase_parallel.parallel.plan import ParallelPlan

THINK = "<think>quick.</think><recaption>a dog!</recaption>"
REQUEST = TextRequest("draw it", None, None, "think_recaption", need_ratio=True, max_new_tokens=60)


class Stopped(Exception):
    """What a section raises when the user cancels."""


def alone(folder: Path) -> Engine:
    return run_ranks(lambda plan, comm: engine_of(folder, plan, comm), "single", world_size=1)[0]


def facts(result: TextResult) -> TextResult:
    """Without the times and the reasons."""
    return replace(result, prefill_seconds=0.0, decode_seconds=0.0, close_seconds=0.0, decode="", reduction="")


@pytest.mark.parametrize("name", ["tp2", "tp8", "hybrid4-ulysses", "hybrid8-s2-cfg_sp", "hybrid8-s4-ulysses"])
def test_every_rank_of_every_plan_writes_the_same(name: str, instruct: Path) -> None:
    def body(plan: ParallelPlan, comm: Communicator) -> tuple[TextResult, torch.Tensor]:
        seen: list[torch.Tensor] = []
        result = engine_of(instruct, plan, comm).generate_text(REQUEST, trace=seen.append)
        return facts(result), torch.stack(seen)

    ((wanted, logits),) = run_ranks(body, "single", world_size=1)
    assert wanted.cot_text == THINK and wanted.recaption == "a dog!" and wanted.ratio_index == 12 and not wanted.truncated
    results = run_ranks(body, **ALL_PLANS[name])
    for result, seen in results:
        assert result == wanted
        assert torch.equal(seen, results[0][1])
    assert float((results[0][1] - logits).abs().max() / logits.abs().max()) < 1e-5


@pytest.mark.parametrize("seed", [0, 7])
def test_sampled_text_is_the_same_on_all_ranks_and_follows_the_seed(seed: int, instruct: Path) -> None:
    """A temperature that makes the random rows likely."""
    sampling = Sampling(do_sample=True, temperature=30.0, top_k=100, top_p=0.99, repetition_penalty=1.1, seed=seed)
    request = replace(REQUEST, max_new_tokens=12, sampling=sampling)

    def body(plan: ParallelPlan, comm: Communicator) -> tuple[int, ...]:
        return engine_of(instruct, plan, comm).generate_text(request).tokens

    tokens = run_ranks(body, **ALL_PLANS["hybrid4-ulysses"])
    assert len(set(tokens)) == 1
    assert tokens[0] == run_ranks(body, "single", world_size=1)[0]
    other = replace(request, sampling=replace(sampling, seed=seed + 1))
    assert alone(instruct).generate_text(other).tokens != tokens[0]


class TestLimits:
    @pytest.mark.parametrize("limit", [1, 2, 5])
    def test_text_is_cut_at_the_limit(self, limit: int, instruct: Path) -> None:
        result = alone(instruct).generate_text(replace(REQUEST, max_new_tokens=limit))
        assert len(result.tokens) == limit
        assert result.truncated and result.end == "max_new_tokens" and result.ratio_index is None

    def test_limit_on_the_last_token_is_not_a_cut(self, instruct: Path) -> None:
        engine = alone(instruct)
        whole = engine.generate_text(REQUEST)
        exact = engine.generate_text(replace(REQUEST, max_new_tokens=len(whole.tokens)))
        assert exact.tokens == whole.tokens and not exact.truncated and exact.end == "stop"

    @pytest.mark.parametrize("limit", [0, -3])
    def test_limit_below_one_is_refused(self, limit: int, instruct: Path) -> None:
        with pytest.raises(
            TextStageError,
            match=rf"^max_new_tokens {limit} after a prompt of \d+ tokens leaves no room in 4096 positions; ask for at least 1",
        ):
            alone(instruct).generate_text(replace(REQUEST, max_new_tokens=limit))

    def test_positions_end_the_text(self, instruct: Path) -> None:
        """A prompt that leaves room for three tokens gets three."""
        engine = alone(instruct)
        prompt = "x" * (4096 - 3 - len(engine.generate_text(replace(REQUEST, prompt="")).prompt_tokens))
        result = engine.generate_text(replace(REQUEST, prompt=prompt))
        assert len(result.prompt_tokens) == 4093 and len(result.tokens) == 3 and result.truncated and result.end == "positions"

    def test_prompt_that_fills_all_positions(self, instruct: Path) -> None:
        engine = alone(instruct)
        room = 4096 - len(engine.generate_text(replace(REQUEST, prompt="")).prompt_tokens)
        with pytest.raises((TextStageError, SequenceError), match="4096"):
            engine.generate_text(replace(REQUEST, prompt="x" * room))
        with pytest.raises(SequenceError, match="4096"):
            engine.generate_text(replace(REQUEST, prompt="x" * 5000))

    @pytest.mark.parametrize("task", ["img_ratio", "image"])
    def test_ratio_tasks_write_one_token(self, task: str, instruct: Path) -> None:
        result = alone(instruct).generate_text(TextRequest("a", None, None, task, need_ratio=True, max_new_tokens=500))
        assert len(result.tokens) == 1 and result.ratio_index is not None and result.cot_text is None

    def test_ratio_of_the_base_release(self, eight_ways: Path) -> None:
        result = alone(eight_ways).generate_text(TextRequest("a", None, None, "img_ratio", need_ratio=True, max_new_tokens=1))
        assert result.ratio_index == 12

    def test_base_release_has_no_think_task(self, eight_ways: Path) -> None:
        with pytest.raises(TextStageError):
            alone(eight_ways).generate_text(replace(REQUEST, task="think"))


class TestReports:
    def run(self, folder: Path) -> tuple[TextResult, list[tuple[int, int]], list[dict[str, Any]]]:
        checks: list[tuple[int, int]] = []
        events: list[dict[str, Any]] = []
        result = alone(folder).generate_text(REQUEST, check=lambda done, total: checks.append((done, total)), report=events.append)
        return result, checks, events

    def test_ranks_meet_around_the_first_token_every_few_and_at_the_end(self, instruct: Path) -> None:
        result, checks, _ = self.run(instruct)
        count = len(result.tokens)
        assert [done for done, _ in checks] == [0, *range(1, count, TOKENS_PER_CHECK), count]
        assert {total for _, total in checks} == {REQUEST.max_new_tokens}

    def test_text_grows_in_the_events(self, instruct: Path) -> None:
        result, _, events = self.run(instruct)
        assert [event["done"] for event in events][-1] == len(result.tokens)
        texts = [event["text"] for event in events]
        assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
        assert texts[-1] == result.text and result.text.startswith("quick.")

    def test_a_stop_ends_it_and_the_next_text_is_whole(self, instruct: Path) -> None:
        engine = alone(instruct)
        whole = facts(engine.generate_text(REQUEST))

        def stop(done: int, total: int) -> None:
            if done >= 8:
                raise Stopped

        engine.prefixes.clear()
        with pytest.raises(Stopped):
            engine.generate_text(REQUEST, check=stop)
        assert engine.prefixes.nbytes == 0, "nothing of a stopped text is kept"
        assert facts(engine.generate_text(REQUEST)) == whole


class TestReuse:
    def test_kept_tokens_are_those_with_keys_and_values(self, instruct: Path) -> None:
        """The last token was chosen but never went through the trunk."""
        engine = alone(instruct)
        result = engine.generate_text(REQUEST)
        text = engine.prefixes._text
        assert text.tokens == (*result.prompt_tokens, *result.tokens[:-1])
        assert text.cache.length == len(text.tokens)

    @pytest.mark.parametrize("name", ["single", "hybrid4-ulysses", "hybrid4-cfg"])
    def test_picture_row_of_the_written_text_goes_on_in_its_cache(self, name: str, instruct: Path) -> None:
        """Here the joined text has the same tokens as the written one, so everything up to the ratio token is there already."""

        def body(plan: ParallelPlan, comm: Communicator) -> tuple[int, int, float]:
            engine = engine_of(instruct, plan, comm)
            result = engine.generate_text(REQUEST)
            height, width = engine.table.size(result.ratio_index)
            row = build_image_rows(
                engine.tokenizer,
                engine.config,
                prompt=REQUEST.prompt,
                system_prompt=None,
                cot_text=result.cot_text,
                cond_images=(),
                height=height,
                width=width,
            ).cond
            record = engine.prefixes.prepare(row, (), frozenset({0, 1}))
            fresh = engine_of(instruct, plan, comm, reuse_text=False).prefixes.prepare(row, (), frozenset({0, 1}))
            end = row.prefix_length
            error = (record.cache.v[:, :end] - fresh.cache.v[:, :end]).abs().max() / fresh.cache.v[:, :end].abs().max()
            assert record.reused == len(result.prompt_tokens) + len(result.tokens) - 1
            return record.reused, end, float(error)

        for reused, prefix, error in run_ranks(body, **ALL_PLANS[name]):
            assert 0 < prefix - reused <= 2
            assert error < 1e-5
