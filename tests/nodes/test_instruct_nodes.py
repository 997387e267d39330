"""Pictures, questions and texts in the nodes, with a small Instruct checkpoint and the real engine in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lone_engine import Events, RecordingHandle, lone_engine

from phase_parallel.nodes import host_compat, node_ask
from phase_parallel.nodes.image_rows import build_conditionings, picture_rows
from phase_parallel.nodes.node_ask import HunyuanImage3Ask
from phase_parallel.nodes.node_encode import HunyuanImage3Encode
from phase_parallel.nodes.node_loader import sampler_hint
from phase_parallel.nodes.node_noise import REFERENCE_SHAPES
from phase_parallel.nodes.references import prepare_references
from phase_parallel.nodes.text_socket import HunyuanText
from phase_parallel.nodes.text_stage import Sampling, TextWish, run_text_stage
from phase_parallel.nodes.vae_socket import HunyuanVae

WISH = TextWish(
    prompt="a dog runs",
    task="think + recaption",
    system_prompt="None",
    custom_system_prompt="",
    size="auto",
    width=1024,
    height=1024,
    max_new_tokens=64,
    seed=7,
    sampling=Sampling("greedy"),
)
BASE = Path(__file__).resolve().parents[1] / "golden" / "checkpoints" / "tiny-base"
WHOLE = "<think>quick.</think><recaption>a dog!</recaption>"


@pytest.fixture
def engine(small_instruct: Path) -> RecordingHandle:
    return lone_engine(small_instruct)


def picture(height: int = 40, width: int = 60, channels: int = 3, *, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.rand(batch, height, width, channels, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [(1, 1), (1, 7), (13, 5), (700, 300), (64, 64)])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_pictures_of_any_size_and_colour(engine: RecordingHandle, size: tuple[int, int], channels: int) -> None:
    references = prepare_references(engine, (picture(*size, channels),), seed=3)
    (prepared,) = references.pictures
    assert tuple(prepared.pixels.shape[-2:]) in engine.table.rows
    assert len(references.keys) == 1 and engine.made == []


def test_alpha_is_dropped_and_grey_is_three_equal_channels(engine: RecordingHandle) -> None:
    colour, grey = picture(), picture(channels=1)
    with_alpha = torch.cat([colour, torch.zeros(1, 40, 60, 1)], dim=-1)
    assert prepare_references(engine, (with_alpha,), seed=0).keys == prepare_references(engine, (colour,), seed=0).keys
    assert prepare_references(engine, (grey,), seed=0).keys == prepare_references(engine, (grey.expand(-1, -1, -1, 3),), seed=0).keys


def test_keys_name_picture_seed_and_place(engine: RecordingHandle) -> None:
    one, two = picture(seed=1), picture(seed=2)
    both = prepare_references(engine, (one, None, two), seed=5).keys
    assert prepare_references(engine, (one, two), seed=5).keys == both, "an empty socket between two is no picture"
    assert prepare_references(engine, (two, one), seed=5).keys != both
    assert prepare_references(engine, (one, two), seed=6).keys != both


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (picture(batch=3), "image2 holds a batch of 3 pictures"),
        (torch.rand(8, 8, 3), "image2 has shape"),
        (torch.rand(1, 8, 8, 2), "image2 has shape"),
        (torch.rand(0, 8, 8, 3), "image2 has shape"),
        ("a file name", "image2 has shape"),
        (picture(1, 900), "^image2 is 900x1 .* at most 64 times the short one; crop it first"),
    ],
)
def test_what_is_no_picture_is_a_sentence(engine: RecordingHandle, image: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        prepare_references(engine, (picture(), image), seed=0)
    assert engine.made == []


def test_encode_carries_the_pictures(engine: RecordingHandle) -> None:
    clip, vae = HunyuanText(engine), HunyuanVae(engine)
    encode = HunyuanImage3Encode().encode
    first, second = picture(seed=1), picture(seed=2)
    positive, negative, latent = encode(clip, vae, "a dog", 256, 256, image1=first)
    other, _, _ = encode(clip, vae, "a dog", 256, 256, image1=second)
    rows = [conditioning[0][1]["hunyuan_image_3_row"] for conditioning in (positive, negative, other)]
    assert rows[0].references.keys == rows[1].references.keys != rows[2].references.keys
    assert rows[0].row.tokens == rows[2].row.tokens and rows[0].digest != rows[2].digest, "equal words, other picture"
    assert len(rows[0].row.cond) == 1
    assert latent[REFERENCE_SHAPES] == rows[0].references.latent_shapes
    assert engine.made == [], "no rank works before the sampler does"


def test_text_about_a_picture_and_the_saving_of_its_prefix(engine: RecordingHandle) -> None:
    wish = replace(WISH, images=(picture(),), reference_seed=5)
    outcome = run_text_stage(engine, wish, node_id="1", report=None)
    assert outcome.cot_text == WHOLE and outcome.recaption == "a dog!" and outcome.note == ""
    assert (outcome.height, outcome.width) == engine.table.size(12)
    references = prepare_references(engine, wish.images, seed=5)
    assert engine.results("encode_references") == [{"keys": list(references.keys)}]
    positive, negative = build_conditionings(
        engine, prompt=wish.prompt, system_prompt=None, cot_text=outcome.cot_text, height=outcome.height, width=outcome.width,
        references=references,
    )  # fmt: skip
    events = Events()
    args = {
        "rows": [{"kind": r.kind, "row": r.row.to_json(), "references": list(references.keys), "latent": 0} for r in (positive, negative)],
        "sigma": 1.0, "sigma_next": 0.9, "guidance": None,
    }  # fmt: skip
    latents = torch.zeros(1, engine.config.vae.latent_channels, outcome.height // 16, outcome.width // 16)
    for _ in range(2):
        engine.call("denoise", args, {"latents": latents}, node_id="1", report=events)
    first, second = engine.results("denoise")
    assert 0 < first["reused_tokens"] < first["prefix_tokens"] == second["reused_tokens"]
    (shown,) = events.texts("prefix")
    assert shown.startswith(f"{first['reused_tokens']} of {first['prefix_tokens']} prompt tokens reused")


def test_cut_text_is_closed_and_the_node_says_so(engine: RecordingHandle) -> None:
    outcome = run_text_stage(engine, replace(WISH, max_new_tokens=3), node_id="1", report=None)
    assert outcome.cot_text == "<think>qui</think>"
    assert "reached max_new_tokens (3)" in outcome.note and "tags were closed" in outcome.note
    assert (outcome.height, outcome.width) in engine.table.rows, "the size is still the model's"
    rows = picture_rows(
        engine, prompt="a dog", system_prompt=None, cot_text=outcome.cot_text, height=outcome.height, width=outcome.width
    )
    special = engine.tokenizer.special
    assert special.think in rows.cond.tokens and special.think_end in rows.cond.tokens


def test_size_that_becomes_another_is_said(engine: RecordingHandle) -> None:
    wish = replace(WISH, task="off", size="width x height", width=100, height=100)
    assert "100x100 is not a size of this model" in run_text_stage(engine, wish, node_id="1", report=None).note
    follow = replace(WISH, task="off", size="follow image 1", images=(picture(64, 128),))
    outcome = run_text_stage(engine, follow, node_id="1", report=None)
    assert outcome.width / outcome.height == pytest.approx(2, rel=0.2)


def test_given_text_is_kept_and_the_model_chooses_the_size(engine: RecordingHandle) -> None:
    outcome = run_text_stage(engine, replace(WISH, task="auto ratio", cot_text=WHOLE), node_id="1", report=None)
    assert outcome.cot_text == WHOLE
    (_, args, _) = engine.made[0]
    assert (args["task"], args["cot_text"]) == ("img_ratio", WHOLE)


def test_seeds_of_a_sampled_text(engine: RecordingHandle) -> None:
    hot = Sampling("sample", 8.0, 1000, 1.0)

    def text(seed: int) -> str:
        wish = replace(WISH, task="recaption", size="width x height", max_new_tokens=12, seed=seed, sampling=hot)
        return run_text_stage(engine, wish, node_id="1", report=None).cot_text

    assert len({text(seed) for seed in (0, 1, 42, 2**40)}) == 4
    assert text(42) == text(42)


def test_dropped_thinking_brings_the_official_recaption_prompt(engine: RecordingHandle) -> None:
    def tokens(system_prompt: str | None, cot_text: str) -> tuple[int, ...]:
        return picture_rows(
            engine, prompt="a dog", system_prompt=system_prompt, cot_text=cot_text, height=256, width=256
        ).cond.tokens

    recaption, official = "<recaption>a dog!</recaption>", "Describe the picture, then draw it."
    plain, wanted, alone = tokens(None, recaption), tokens(official, recaption), tokens("Mine.", "")
    engine.config = replace(engine.config, generation=replace(engine.config.generation, drop_think=True))
    assert tokens("Mine.", WHOLE) == wanted
    assert tokens(None, WHOLE) == plain, "no system prompt stays none"
    assert tokens("Mine.", "") == alone, "nothing was thought"


def test_ask_answers_about_a_picture(engine: RecordingHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events()
    monkeypatch.setattr(node_ask, "NodeProgress", lambda node_id: events)
    answer = HunyuanImage3Ask().ask(
        HunyuanText(engine), "what is it", do_sample="greedy", max_new_tokens=5, image1=picture(), reference_seed=5
    )
    (result,) = engine.results("generate_text")
    assert answer["result"] == (result["answer"],)
    assert (result["height"], result["width"], result["cot_text"]) == (None, None, None)
    (_, args, _) = engine.made[-1]
    assert args["references"] == engine.results("encode_references")[0]["keys"]
    assert events.texts("tokens"), "the text is shown while it is written"
    if result["truncated"]:
        assert "reached max_new_tokens (5)" in answer["ui"]["text"][0]


def test_ask_refuses(engine: RecordingHandle) -> None:
    ask = HunyuanImage3Ask().ask
    with pytest.raises(ValueError, match="base checkpoint, which answers no questions"):
        ask(HunyuanText(lone_engine(BASE)), "what is it")
    with pytest.raises(ValueError, match="prompt is empty"):
        ask(HunyuanText(engine), " ")
    with pytest.raises(ValueError, match="contains <img>"):
        ask(HunyuanText(engine), "what is <img>")
    with pytest.raises(ValueError, match="max_position_embeddings"):
        ask(HunyuanText(engine), "x" * 5000)
    assert engine.made == []


def test_loader_tells_steps_and_cfg(engine: RecordingHandle, small_distil: Path) -> None:
    assert sampler_hint(engine) == "sample with 50 steps and cfg 2.5"
    hint = sampler_hint(lone_engine(small_distil))
    assert "8 steps and cfg 1" in hint and "(2.5)" in hint and "Guidance" in hint


def test_changed_size_is_shown_on_encode(engine: RecordingHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(host_compat, "show_text", lambda text, node_id: shown.append(text))
    encode = HunyuanImage3Encode().encode
    encode(HunyuanText(engine), HunyuanVae(engine), "a dog", 256, 256)
    assert shown == []
    encode(HunyuanText(engine), HunyuanVae(engine), "a dog", 100, 100)
    assert shown == ["100x100 is not a size of this model; the nearest one is drawn: 256x256."]
