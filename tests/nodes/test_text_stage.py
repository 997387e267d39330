"""Size and text before the picture: what runs the model, what does not, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from phase_parallel.nodes.engine_handle import EngineHandle
from phase_parallel.nodes.text_stage import Sampling, TextOutcome, TextWish, run_text_stage

WISH = TextWish(
    prompt="a tall tower",
    task="auto ratio",
    system_prompt="checkpoint default",
    custom_system_prompt="",
    size="auto",
    width=1024,
    height=1024,
    max_new_tokens=64,
    seed=7,
    sampling=Sampling(),
)


def run(engine: EngineHandle, **changes: Any) -> TextOutcome:
    return run_text_stage(engine, replace(WISH, **changes), node_id="1", report=None)


def test_auto_ratio_asks_the_model_once(engine: EngineHandle, calls: Any) -> None:
    outcome = run(engine)
    assert (outcome.height, outcome.width) == (352, 160)
    assert calls.names == ["generate_text"]
    _, args, _ = calls.made[0]
    assert args["task"] == "img_ratio"
    assert args["image_size"] == "auto"
    assert args["max_new_tokens"] == 1
    assert args["engine"]["folder"].endswith("tiny-base")


def test_sampling_falls_back_to_the_checkpoint(engine: EngineHandle, calls: Any) -> None:
    own = engine.config.generation
    run(engine)
    run(engine, sampling=Sampling("greedy", 0.9, 5, 0.5, 1.1))
    first, second = (args for _, args, _ in calls.made)
    assert (first["do_sample"], first["temperature"], first["top_k"]) == (
        own.do_sample,
        own.temperature,
        own.top_k,
    )
    chosen = {name: second[name] for name in ("do_sample", "temperature", "top_k", "top_p")}
    assert chosen == {"do_sample": False, "temperature": 0.9, "top_k": 5, "top_p": 0.5}
    assert second["repetition_penalty"] == 1.1


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({"size": "width x height", "width": 400, "height": 120}, (128, 432)),
        ({"size": "2048x512 (4:1)"}, (128, 512)),
        ({"size": "follow image 1", "images": (torch.zeros(1, 300, 100, 3),)}, None),
        ({"task": "off", "width": 512, "height": 512}, (256, 256)),
    ],
)
def test_a_given_size_runs_no_model(
    engine: EngineHandle, calls: Any, changes: dict[str, Any], size: tuple[int, int] | None
) -> None:
    if size is None:  # the base checkpoint takes no pictures, not even to follow one
        with pytest.raises(ValueError, match="draws from text only"):
            run(engine, **changes)
    else:
        outcome = run(engine, **changes)
        assert (outcome.height, outcome.width) == size
    assert calls.made == []


def test_following_an_image_needs_one(engine: EngineHandle) -> None:
    with pytest.raises(ValueError, match="image1 is not connected"):
        run(engine, size="follow image 1")


@pytest.mark.parametrize("task", ["think + recaption", "recaption", "think"])
def test_base_checkpoint_does_not_write(engine: EngineHandle, calls: Any, task: str) -> None:
    with pytest.raises(ValueError, match="base checkpoint, which was not trained"):
        run(engine, task=task)
    assert calls.made == []


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "The prompt is empty"),
        (" \n ", "The prompt is empty"),
        ("a <img> of a cat", "contains <img>"),
        ("tower</think>", "contains </think>"),
    ],
)
def test_prompts_that_cannot_be_used(engine: EngineHandle, calls: Any, prompt: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run(engine, prompt=prompt)
    assert calls.made == []


def test_custom_system_prompt_with_control_tokens_is_refused(engine: EngineHandle) -> None:
    with pytest.raises(ValueError, match=r"^custom_system_prompt contains <boi>"):
        run(engine, system_prompt="custom", custom_system_prompt="draw <boi>")


def test_custom_system_prompt_reaches_the_model(engine: EngineHandle, calls: Any) -> None:
    run(engine, system_prompt="custom", custom_system_prompt="Draw what the user says.")
    assert calls.made[0][1]["system_prompt"] == "Draw what the user says."


def test_official_system_prompt_that_is_not_there_is_a_sentence(engine: EngineHandle) -> None:
    with pytest.raises(ValueError, match=r"system_prompt\.py"):
        run(engine, system_prompt="en_unified")


def test_a_prompt_that_is_too_long_is_refused_before_the_ranks_are_asked(
    engine: EngineHandle, calls: Any
) -> None:
    with pytest.raises(ValueError, match=r"The row has \d+ tokens"):
        run(engine, prompt="x" * (engine.config.max_position_embeddings + 1))
    assert calls.names == []
