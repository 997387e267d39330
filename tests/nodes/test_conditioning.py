"""What the CONDITIONING socket carries, and every refusal before an engine is called."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phase_parallel.nodes.conditioning import (
    ROW_KEY,
    ConditioningError,
    RowConditioning,
    check_branch,
    check_latent,
    check_pair,
    find_row,
)
from phase_parallel.nodes.engine_handle import EngineHandle
from phase_parallel.nodes.image_rows import build_conditionings


def rows(engine: EngineHandle, prompt: str = "a cat", size: tuple[int, int] = (256, 256)) -> tuple:
    return build_conditionings(
        engine, prompt=prompt, system_prompt=None, cot_text="", height=size[0], width=size[1]
    )


def as_sampler_sees(row: RowConditioning, **extra: object) -> dict:
    marker, options = row.as_conditioning()[0]
    return {"cross_attn": marker, **options, **extra}


@pytest.fixture
def positive(engine: EngineHandle) -> RowConditioning:
    return rows(engine)[0]


@pytest.fixture
def negative(engine: EngineHandle) -> RowConditioning:
    return rows(engine)[1]


def test_rows_of_one_prompt_are_a_pair(positive: RowConditioning, negative: RowConditioning) -> None:
    assert (positive.kind, negative.kind) == ("cond", "uncond")
    assert positive.pair == negative.pair
    assert len(positive.row.tokens) == len(negative.row.tokens)
    check_pair([positive], [negative])


def test_handles_differ_by_row_and_branch_and_fit_int64(
    engine: EngineHandle, positive: RowConditioning, negative: RowConditioning
) -> None:
    other = rows(engine, "a dog")[0]
    handles = [positive.handle, negative.handle, other.handle]
    assert len(set(handles)) == 3
    assert torch.tensor(handles, dtype=torch.int64).tolist() == handles


def test_row_survives_what_copying_nodes_do(positive: RowConditioning) -> None:
    assert find_row(as_sampler_sees(positive, timestep_start=0.5), where="positive") is positive


def test_conditioning_of_another_encoder_is_refused(positive: RowConditioning) -> None:
    with pytest.raises(ConditioningError, match="negative conditioning was not made by"):
        find_row({"cross_attn": torch.zeros(1, 77, 768)}, where="negative")
    with pytest.raises(ConditioningError, match="was not made by"):
        find_row({"cross_attn": positive.marker, ROW_KEY: "text"}, where="positive")


def test_conditioning_changed_by_another_node_is_refused(positive: RowConditioning) -> None:
    changed = as_sampler_sees(positive) | {"cross_attn": torch.zeros_like(positive.marker)}
    with pytest.raises(ConditioningError, match="changed by another node"):
        find_row(changed, where="positive")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("area", (4, 4, 0, 0), "an area"),
        ("mask", torch.ones(1, 8, 8), "a mask"),
        ("control", object(), "a ControlNet"),
        ("gligen", ("position", None, []), "GLIGEN"),
        ("hooks", object(), "hooks"),
    ],
)
def test_what_the_model_cannot_use_is_refused(
    positive: RowConditioning, key: str, value: object, words: str
) -> None:
    with pytest.raises(ConditioningError, match=words):
        find_row(as_sampler_sees(positive, **{key: value}), where="positive")


def test_another_checkpoint_is_refused(positive: RowConditioning, other_engine: EngineHandle) -> None:
    with pytest.raises(ConditioningError, match=r"one Load HunyuanImage-3\.0 node"):
        check_branch(positive, other_engine, where="positive")


def test_exchanged_wires_are_refused(
    engine: EngineHandle, positive: RowConditioning, negative: RowConditioning
) -> None:
    check_branch(positive, engine, where="positive")
    check_branch(negative, engine, where="negative")
    with pytest.raises(ConditioningError, match="exchange the two wires"):
        check_branch(negative, engine, where="positive")
    with pytest.raises(ConditioningError, match="exchange the two wires"):
        check_branch(positive, engine, where="negative")


def test_negative_of_another_prompt_is_refused(engine: EngineHandle, positive: RowConditioning) -> None:
    with pytest.raises(ConditioningError, match="another prompt or size"):
        check_pair([positive], [rows(engine, "two dogs")[1]])


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((1, 4, 32, 32), "4 channels"),
        ((1, 16, 32, 32), "512x512 pixels"),
        ((1, 16, 16, 8), "128x256 pixels"),
        ((1, 16, 1, 16, 16), "5 dimensions"),
    ],
)
def test_latent_of_another_model_or_size_is_refused(
    positive: RowConditioning, shape: tuple[int, ...], words: str
) -> None:
    check_latent((2, 16, 16, 16), positive)
    with pytest.raises(ConditioningError, match=words):
        check_latent(shape, positive)


def test_distilled_checkpoint_has_no_unconditional_row(engine: EngineHandle) -> None:
    engine.config = replace(engine.config, cfg_distilled=True)
    positive, negative = rows(engine)
    assert negative.kind == "no_uncond"
    assert positive.guidance == engine.config.generation.diff_guidance_scale
    check_branch(negative, engine, where="negative")
    check_pair([positive], [negative])
