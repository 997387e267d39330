"""Text out of Think / Recaption, through the user's hands, into Encode and Generate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lone_engine import RecordingHandle, lone_engine
from torch.nn.functional import one_hot

from phase_parallel.models.hunyuan_image_3.system_prompts import resolve_system_prompt
from phase_parallel.models.hunyuan_image_3.text_rules import StageRules
from phase_parallel.nodes import host_compat, node_generate, node_rewrite
from phase_parallel.nodes.node_encode import HunyuanImage3Encode
from phase_parallel.nodes.node_generate import HunyuanImage3Generate
from phase_parallel.nodes.node_rewrite import HunyuanImage3Rewrite
from phase_parallel.nodes.progress import NodeProgress
from phase_parallel.nodes.text_socket import HunyuanText
from phase_parallel.nodes.text_stage import Sampling, TextWish, cut_note, run_text_stage
from phase_parallel.nodes.vae_socket import HunyuanVae

PROMPT, WHOLE = "a dog runs", "<think>quick.</think><recaption>a dog!</recaption>"


class SilentProgress(NodeProgress):
    """Without ComfyUI's bar."""

    def __call__(self, event: dict) -> None: ...


def model_of(engine: RecordingHandle) -> Any:
    """What Load gives to Generate's model input."""
    return type("Model", (), {"model": type("Inner", (), {"engine": engine})()})()


@pytest.fixture
def engine(small_instruct: Path, monkeypatch: pytest.MonkeyPatch) -> RecordingHandle:
    monkeypatch.setattr(node_rewrite, "NodeProgress", SilentProgress)
    return lone_engine(small_instruct)


@pytest.fixture
def tokens(engine: RecordingHandle) -> Callable[..., tuple[int, ...]]:
    def of(cot_text: str, height: int = 256, width: int = 256, **more: Any) -> tuple[int, ...]:
        encode = HunyuanImage3Encode().encode
        positive, _, _ = encode(HunyuanText(engine), HunyuanVae(engine), PROMPT, width, height, cot_text=cot_text, **more)
        return positive[0][1]["hunyuan_image_3_row"].row.tokens

    return of


@pytest.mark.parametrize("with_picture", [False, True])
def test_unedited_text_is_the_same_row_as_no_detour(
    engine: RecordingHandle, tokens: Callable[..., tuple[int, ...]], with_picture: bool
) -> None:
    """The row that Encode makes begins with the very tokens that the model read and wrote; only an edit leaves them."""
    image = torch.rand(1, 40, 60, 3) if with_picture else None
    answer = HunyuanImage3Rewrite().rewrite(
        HunyuanText(engine), PROMPT, "think + recaption", do_sample="greedy", max_new_tokens=64, image1=image
    )
    cot_text, recaption, width, height = answer["result"]
    assert (cot_text, recaption) == (WHOLE, "a dog!")
    (text,) = engine.results("generate_text")
    closing = text["tokens"].index(engine.tokenizer.special.recaption_end) + 1
    written = (*text["prompt_tokens"], *text["tokens"][:closing])
    assert tokens(cot_text, height, width, image1=image)[: len(written)] == written
    edited = tokens(cot_text.replace("dog", "cat"), height, width, image1=image)
    assert edited[: len(written)] != written and edited[: len(text["prompt_tokens"])] == written[: len(text["prompt_tokens"])]


@pytest.mark.parametrize(
    ("task", "official"),
    [("auto ratio", "en_vanilla"), ("recaption", "en_recaption"), ("think", "en_think_recaption"), ("think + recaption", "custom")],
)
def test_dynamic_instruction_is_the_same_for_text_and_picture(
    engine: RecordingHandle, tokens: Callable[..., tuple[int, ...]], task: str, official: str
) -> None:
    """The official program chooses it once, by the task; another one for the picture would also undo the reuse of what was read."""
    mine = {"custom_system_prompt": "Mine."}
    wanted = resolve_system_prompt(engine.folder, official, kind="instruct", task="image", custom="Mine.")
    answer = HunyuanImage3Rewrite().rewrite(
        HunyuanText(engine), PROMPT, task, size="auto", do_sample="greedy", max_new_tokens=64, system_prompt="dynamic", **mine
    )
    cot_text, _, width, height = answer["result"]
    (_, args, _) = next(made for made in engine.made if made[0] == "generate_text")
    assert args["system_prompt"] == wanted
    row = tokens(cot_text, height, width, system_prompt="dynamic", **mine)
    assert row == tokens(cot_text, height, width, system_prompt="custom", custom_system_prompt=wanted)


def test_given_text_is_not_written_again(engine: RecordingHandle) -> None:
    text = "<recaption>a cat</recaption>"
    wish = TextWish(PROMPT, "recaption", "dynamic", "", "auto", 1024, 1024, 8, 0, Sampling("greedy"), cot_text=text)
    assert run_text_stage(engine, wish, node_id="1", report=None).cot_text == text
    (made,) = engine.made
    assert made[1]["task"] == "img_ratio" and made[1]["system_prompt"] == "Describe the picture, then draw it."


@pytest.mark.parametrize(
    "cot_text",
    [
        "<think>quick.<recaption>a dog!</recaption>",
        "<think>quick.</think>a dog!</recaption>",
        "</recaption>a dog!<recaption>",
        "<recaption>a</recaption><recaption>b</recaption>",
    ],
)
def test_a_tag_that_lost_its_partner_is_a_sentence(
    engine: RecordingHandle, tokens: Callable[..., tuple[int, ...]], cot_text: str
) -> None:
    with pytest.raises(ValueError, match=r"cot_text has . <.*give it one pair"):
        tokens(cot_text)
    clip, vae = HunyuanText(engine), HunyuanVae(engine)
    with pytest.raises(ValueError, match=r"cot_text has . <.*give it one pair"):
        HunyuanImage3Generate().generate(model_of(engine), clip, vae, PROMPT, cot_text=cot_text)
    assert engine.made == []


@pytest.mark.parametrize(
    ("cot_text", "words"),
    [
        ("<think>a<recaption>b</think>c</recaption>", r"^cot_text has <recaption> at character 9, .*; put </think> before <recaption>"),
        ("<think>a<recaption>b</recaption></think>", r"^cot_text has <recaption> at character 9, .*; put </think> before <recaption>"),
        ("<recaption><think>a</think>b</recaption>", r"^cot_text has <think> at character 12, .*; put </recaption> before <think>"),
    ],
)
def test_pairs_inside_each_other_are_a_sentence(
    engine: RecordingHandle, tokens: Callable[..., tuple[int, ...]], cot_text: str, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        tokens(cot_text)
    with pytest.raises(ValueError, match=words):
        HunyuanImage3Generate().generate(model_of(engine), HunyuanText(engine), HunyuanVae(engine), PROMPT, cot_text=cot_text)


@pytest.mark.parametrize("blank", [" ", "\n", " \t\n"])
def test_a_blank_text_is_none(
    engine: RecordingHandle, tokens: Callable[..., tuple[int, ...]], blank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tokens(blank) == tokens("")
    monkeypatch.setattr(node_generate, "NodeProgress", SilentProgress)
    monkeypatch.setattr(host_compat, "result_device", lambda: torch.device("cpu"))
    generate = HunyuanImage3Generate().generate
    _, text = generate(
        model_of(engine), HunyuanText(engine), HunyuanVae(engine), PROMPT, task="recaption", size="width x height", width=256,
        height=256, steps=1, do_sample="greedy", max_new_tokens=4, cot_text=blank,
    )  # fmt: skip
    assert text.startswith("<recaption>"), "the model wrote"


HOT = {"do_sample": "sample", "temperature": 40.0, "top_k": 5000, "top_p": 1.0}


@pytest.mark.parametrize("task", ["think", "recaption", "think + recaption"])
@pytest.mark.parametrize("size", ["auto", "width x height"])
def test_whatever_the_model_writes_can_be_encoded(
    engine: RecordingHandle, tokens: Callable[..., tuple[int, ...]], task: str, size: str
) -> None:
    """A temperature at which every token of the vocabulary is likely."""
    repaired = 0
    for seed in range(8):
        answer = HunyuanImage3Rewrite().rewrite(
            HunyuanText(engine), PROMPT, task, size=size, width=256, height=256, seed=seed, max_new_tokens=30, **HOT
        )
        cot_text, recaption, width, height = answer["result"]
        assert tokens(cot_text, height, width)
        assert recaption == (cot_text.partition("<recaption>")[2].removesuffix("</recaption>"))
        legal = engine.results("generate_text")[-1]["legal"]
        said = "So that the text can be used, " in answer["ui"]["text"][0]
        assert said == bool(legal["removed"] or legal["added"])
        repaired += bool(legal["removed"])
    assert repaired, "some text had control tokens"


def test_a_text_that_the_model_ended_itself_was_not_cut(engine: RecordingHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    special = engine.tokenizer.special
    written = iter([*engine.tokenizer.encode("ts"), special.recaption_end])
    monkeypatch.setattr(StageRules, "process", lambda self, logits, last: one_hot(torch.tensor(next(written)), len(logits)).float())
    wish = TextWish(PROMPT, "think", "None", "", "width x height", 256, 256, 3, 0, Sampling("greedy"))
    outcome = run_text_stage(engine, wish, node_id="1", report=None)
    assert outcome.cot_text == "<think>ts</think>" and outcome.recaption == ""
    assert outcome.note == (
        "The text was ended by the model with </recaption> before its own closing tag; another seed may give a whole one. "
        "So that the text can be used, control tokens inside it were taken out (</recaption>) and its tags were closed."
    )


@pytest.mark.parametrize(("limit", "said"), [(3, True), (64, False)])
def test_the_way_to_the_same_dynamic_instruction_of_a_cut_text(
    engine: RecordingHandle, tokens: Callable[..., tuple[int, ...]], limit: int, said: bool
) -> None:
    """Encode goes by the tags; the node that cut the text says what gives the instruction that the text had."""
    mine = {"custom_system_prompt": "Mine."}
    answer = HunyuanImage3Rewrite().rewrite(
        HunyuanText(engine), PROMPT, "think + recaption", do_sample="greedy", max_new_tokens=limit, system_prompt="dynamic", **mine
    )
    assert ("system_prompt 'custom'" in answer["ui"]["text"][0]) == said
    cot_text, _, width, height = answer["result"]
    row = tokens(cot_text, height, width, system_prompt="custom", **mine)
    (text,) = [result for result in engine.results("generate_text") if result["legal"]]
    assert row[: len(text["prompt_tokens"])] == tuple(text["prompt_tokens"])


def test_texts_of_every_task_are_accepted(tokens: Callable[..., tuple[int, ...]]) -> None:
    rows = [tokens(text) for text in ("", "free words", "<think>a</think>", "<recaption>b</recaption>", WHOLE)]
    assert len(set(rows)) == 5


def test_the_limit_that_cut_a_text_is_named(engine: RecordingHandle) -> None:
    assert "raise it for the whole text" in cut_note(engine, "The text", 3, {"tokens": [1, 2, 3], "end": "max_new_tokens"})
    positions = engine.config.max_position_embeddings
    note = cut_note(engine, "The text", 9000, {"tokens": [1, 2, 3], "end": "positions"})
    assert f"filled the model's {positions} positions" in note and "max_new_tokens" not in note


def test_a_user_finds_the_sockets() -> None:
    assert HunyuanImage3Rewrite.RETURN_NAMES == ("cot_text", "recaption", "width", "height")
    for node in (HunyuanImage3Encode, HunyuanImage3Generate):
        kind, options = node.INPUT_TYPES()["optional"]["cot_text"]
        assert kind == "STRING" and options["forceInput"], "a socket of its own on every host"
    assert HunyuanImage3Generate.RETURN_NAMES[1] == "cot_text"
