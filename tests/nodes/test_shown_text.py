"""What stays readable on a node: hosts show the last line that was sent, and nothing else of a text node."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lone_engine import Events, RecordingHandle, lone_engine

from phase_parallel.models.hunyuan_image_3 import random_weights
from phase_parallel.models.hunyuan_image_3.operations import EngineArguments
from phase_parallel.nodes import host_compat, node_ask, node_rewrite
from phase_parallel.nodes.engine_handle import EngineChoice, EngineHandle
from phase_parallel.nodes.image_rows import build_conditionings
from phase_parallel.nodes.node_ask import HunyuanImage3Ask
from phase_parallel.nodes.node_loader import backend_words, weights_words
from phase_parallel.nodes.node_rewrite import HunyuanImage3Rewrite
from phase_parallel.nodes.progress import NodeProgress
from phase_parallel.nodes.references import prepare_references
from phase_parallel.nodes.text_socket import HunyuanText
from phase_parallel.nodes.text_stage import Sampling, TextWish, run_text_stage, speed_line
from phase_parallel.parallel.plan import make_plan

WISH = TextWish("a dog runs", "think + recaption", "None", "", "width x height", 256, 256, 64, 0, Sampling("greedy"))


class SilentProgress(NodeProgress):
    """Without ComfyUI's bar."""

    def __call__(self, event: dict) -> None: ...


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    seen: list[tuple[str, str | None]] = []
    monkeypatch.setattr(host_compat, "show_text", lambda text, node_id: seen.append((text, node_id)))
    for module in (node_ask, node_rewrite):
        monkeypatch.setattr(module, "NodeProgress", SilentProgress)
    return seen


@pytest.fixture
def engine(small_instruct: Path) -> RecordingHandle:
    return lone_engine(small_instruct)


def test_a_note_stays_above_later_lines(shown: list[tuple[str, str | None]]) -> None:
    progress = NodeProgress("7")
    progress({"kind": "prefix", "text": "before"})
    progress.keep("")
    progress.keep("The text was cut.")
    progress({"kind": "prefix", "text": "10 of 12 tokens"})
    assert shown == [("before", "7"), ("The text was cut.", "7"), ("The text was cut.\n10 of 12 tokens", "7")]


def test_cut_text_is_said_on_the_node_that_wrote_it(engine: RecordingHandle, shown: list[tuple[str, str | None]]) -> None:
    answer = HunyuanImage3Rewrite().rewrite(
        HunyuanText(engine), "a dog runs", "think + recaption", do_sample="greedy", max_new_tokens=3, unique_id="4"
    )
    assert shown == [(answer["ui"]["text"][0], "4")]
    assert "reached max_new_tokens (3)" in shown[0][0] and "tags were closed" in shown[0][0]


def test_answer_stays_on_the_node_that_was_asked(engine: RecordingHandle, shown: list[tuple[str, str | None]]) -> None:
    answer = HunyuanImage3Ask().ask(HunyuanText(engine), "what is it", do_sample="greedy", max_new_tokens=4, unique_id="5")
    assert shown == [(answer["ui"]["text"][0], "5")]
    assert shown[0][0].startswith(answer["result"][0])


def test_last_line_says_how_the_text_was_written_and_how_fast(engine: RecordingHandle, shown: list[tuple[str, str | None]]) -> None:
    HunyuanImage3Rewrite().rewrite(HunyuanText(engine), "a dog runs", "think + recaption", do_sample="greedy", unique_id="4")
    HunyuanImage3Ask().ask(HunyuanText(engine), "what is it", do_sample="greedy", max_new_tokens=4, unique_id="5")
    for text, _ in shown:
        assert re.fullmatch(r"AR: eager, one rank, \d+\.\d tokens/s", text.splitlines()[-1])
    assert shown[0][0].startswith("a dog!\n")


def test_speed_line_has_no_reasons_and_needs_two_tokens() -> None:
    measured = {"decode": "one CUDA graph a token", "reduction": "peer memory: its sums passed the self-test on all ranks", "decode_seconds": 0.5}
    assert speed_line({"tokens": [1] * 201, "measured": measured}) == "AR: one CUDA graph a token, peer memory, 400.0 tokens/s"
    assert speed_line({"tokens": [1], "measured": measured}) == ""


@pytest.mark.parametrize(
    ("kernels", "words"),
    [
        ("auto", "kernels eager: no CUDA device; experts eager; text eager: no CUDA device; picture sums one rank: nothing to reduce"),
        ("eager", "kernels eager: chosen; experts eager; text eager: eager kernels were chosen; picture sums one rank: nothing to reduce"),
    ],
)
def test_loader_says_which_kernels_run_and_why(small_instruct: Path, kernels: str, words: str) -> None:
    loaded, _ = lone_engine(small_instruct, kernels=kernels).call("load", {}, {}, node_id="1")
    assert backend_words(loaded["measured"]) == words


def test_loader_says_when_weights_are_random(small_instruct: Path, tmp_path: Path) -> None:
    assert weights_words(str(small_instruct)) == ""
    random_weights.declare(tmp_path)
    assert weights_words(str(tmp_path)) == "random weights, for measuring only: texts and pictures are noise"


def test_operations_take_all_choices() -> None:
    options = EngineArguments("folder", kernels="eager", decode="graph", reduction="group", moe_backend="triton").options()
    assert (options.kernels, options.decode, options.reduction, options.moe_backend) == ("eager", "graph", "group", "triton")


def test_loaders_choice_of_experts_reaches_the_engine(small_instruct: Path) -> None:
    """A rank loads what the arguments of an operation say, and rank 0 looks at the same choices first."""
    choice = EngineChoice(str(small_instruct), make_plan("single", world_size=1), "auto", "micro_major", "multi_micro", "auto", "triton")
    assert EngineArguments(**choice.arguments()).options().moe_backend == "triton"
    assert choice.key != replace(choice, moe_backend="auto").key
    with pytest.raises(ValueError, match=r"^moe_backend flashinfer needs each micro shard in one piece"):
        EngineHandle(replace(choice, moe_layout="expert_major", moe_backend="flashinfer"), None)


def test_saving_is_that_of_the_users_text_wherever_its_row_stands(engine: RecordingHandle) -> None:
    cot_text = run_text_stage(engine, WISH, node_id="1", report=None).cot_text
    edited = cot_text.replace("dog", "cat")

    def told(text: str) -> list[str]:
        rows = build_conditionings(engine, prompt=WISH.prompt, system_prompt=None, cot_text=text, height=256, width=256)
        sent = [{"kind": row.kind, "row": row.row.to_json(), "references": [], "latent": 0} for row in reversed(rows)]
        events = Events()
        latents = torch.zeros(1, engine.config.vae.latent_channels, 16, 16)
        args = {"rows": sent, "sigma": 1.0, "sigma_next": 0.9, "guidance": None}
        engine.call("denoise", args, {"latents": latents}, node_id="1", report=events)
        return events.texts("prefix")

    assert len(told(cot_text)) == len(told(edited)) == 1, "the unconditional rows of both texts are equal"
    assert told(edited) == [], "a row that is kept whole needs no words"


def test_pictures_are_said_once_when_they_are_encoded(engine: RecordingHandle) -> None:
    references = prepare_references(engine, (torch.rand(1, 40, 60, 3), torch.rand(1, 70, 60, 3)), seed=1)
    first, second = Events(), Events()
    references.encode(node_id="1", report=first)
    references.encode(node_id="1", report=second)
    assert first.texts("references") == ["2 reference pictures encoded"]
    assert second.seen == []
