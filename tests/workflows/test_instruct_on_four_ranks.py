"""The graphs for Instruct and Distil checkpoints on a real ComfyUI with four ranks, against golden numbers or one rank without ComfyUI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graph_runs import LEVELS, OTHER_GOLDEN, User, distance, graph_of, node_of, nodes_of, png
from instruct_runs import DISTIL, GREEDY, SMALL, WRITTEN, load_images, pixels, saving, system_prompt
from PIL import Image
from reference_run import Reference
from safetensors.torch import load_file
from server_client import Graph, Run

from phase_parallel.models.hunyuan_image_3.reference_images import to_rgb

pytestmark = [pytest.mark.host, pytest.mark.ranks4, pytest.mark.timeout(1800)]


def golden_case(name: str) -> tuple[dict[str, Any], Path]:
    folder = OTHER_GOLDEN / "cases" / name
    if not folder.is_dir():
        pytest.skip(f"golden case {name} is not beside the checkout")
    return json.loads((folder / "case.json").read_text()), folder


def assert_written_live(run: Run, node: str, whole: str, *, limit: int) -> None:
    """The text grew on the node, and the bar counted its tokens."""
    lines = [text for text in run.texts[node] if whole.startswith(text)]
    assert lines[-1] == whole and lines == sorted(lines, key=len) and len(lines) > 1
    counted = [value for value, maximum in run.progress[node] if maximum == limit]
    assert counted == sorted(counted) and len(set(counted)) == len(lines) and counted[0] <= 4


@pytest.mark.usefixtures("needs_flow")
def test_think_and_recaption_give_the_golden_text_and_size(user: User) -> None:
    spec, _ = golden_case("instruct_t2i_think_recaption_auto")
    want, system = spec["expected"], system_prompt(spec["system_prompt"])
    graph = graph_of(
        "t2i_think_recaption",
        "tiny-instruct",
        {
            "PrimitiveStringMultiline": {"value": spec["prompt"]},
            "HunyuanImage3Rewrite": {**GREEDY, **system},
            "HunyuanImage3Encode": system,
            "KSampler": {"steps": 2, "seed": 5},
        },
    )
    picture, found, run = user.draw(graph)
    assert user.shown(graph, run, "PreviewAny") == want["cot_text"] == found["cot_text"]
    assert (found["height"], found["width"]) == (want["height"], want["width"])
    assert_written_live(run, "HunyuanImage3Rewrite", want["generated_text"], limit=64)
    reused, total = saving(run.texts["KSampler"])
    assert 0 < reused < total
    alone = Reference(OTHER_GOLDEN / "checkpoints" / "tiny-instruct").picture(
        spec["prompt"], (want["height"], want["width"]), seed=5, steps=2, cfg=2.5,
        system_prompt=spec["system_prompt"].strip(), cot_text=want["cot_text"],
    )  # fmt: skip
    assert distance(picture, alone) <= LEVELS


@pytest.mark.usefixtures("needs_flow")
def test_edit_of_one_picture_gives_the_golden_text(user: User) -> None:
    spec, folder = golden_case("instruct_ti2i_recaption_ar")
    want, system = spec["expected"], system_prompt(None)
    graph = graph_of(
        "ti2i_edit",
        "tiny-instruct",
        {
            "PrimitiveStringMultiline": {"value": spec["prompt"]},
            "HunyuanImage3Rewrite": {
                **GREEDY, **system, "task": "recaption", "size": "width x height", "width": 384, "height": 144,
                "reference_seed": spec["seed"],
            },
            "HunyuanImage3Encode": {**system, "reference_seed": spec["seed"]},
            "KSampler": {"steps": 2, "seed": 5},
        },
    )  # fmt: skip
    load_images(user, graph, [(folder / "input_0.png").read_bytes()])
    picture, found, run = user.draw(graph)
    assert user.shown(graph, run, "PreviewAny") == want["cot_text"]
    assert (found["height"], found["width"]) == (want["height"], want["width"])
    reference = Reference(OTHER_GOLDEN / "checkpoints" / "tiny-instruct")
    with Image.open(folder / "input_0.png") as image:
        references = reference.references([np.array(to_rgb(image))], spec["seed"])
    alone = reference.picture(
        spec["prompt"], (want["height"], want["width"]), seed=5, steps=2, cfg=2.5, cot_text=want["cot_text"], references=references
    )
    assert distance(picture, alone) <= LEVELS


def test_two_pictures_give_the_golden_picture(user: User) -> None:
    spec, folder = golden_case("instruct_ti2i_two_images_auto")
    changes = {
        "prompt": spec["prompt"], "task": "auto ratio", "seed": spec["seed"], "steps": spec["steps"], "guidance": spec["guidance"],
        **system_prompt(None), **GREEDY,
    }  # fmt: skip
    graph = graph_of("multi_image", "tiny-instruct", {"HunyuanImage3Generate": changes})
    load_images(user, graph, [(folder / name).read_bytes() for name in spec["input_images"]])
    picture, found, run = user.draw(graph)
    assert (found["height"], found["width"]) == (spec["expected"]["height"], spec["expected"]["width"])
    image = load_file(folder / "expected.safetensors")["image"]
    assert distance(picture, ((image * 0.5 + 0.5).clamp(0, 1) * 255).movedim(0, -1).numpy()) <= LEVELS
    if user.sees_text:
        assert run.texts["HunyuanImage3Generate"].count("2 reference pictures encoded") == 1


def test_three_pictures_are_seen_by_text_and_drawing(user: User, small_instruct: Path) -> None:
    pictures = [pixels(number, 96 + 32 * number) for number in range(3)]
    graph = graph_of("multi_image", SMALL, {"HunyuanImage3Generate": {**GREEDY, **system_prompt(None), "steps": 1, "seed": 3}})
    graph["third"] = json.loads(json.dumps(graph[nodes_of(graph, "LoadImage")[0]]))
    graph[node_of(graph, "HunyuanImage3Generate")]["inputs"]["image3"] = ["third", 0]
    load_images(user, graph, [png(picture) for picture in pictures])
    picture, found, run = user.draw(graph)
    text, size, alone = Reference(small_instruct).generated(found["prompt"], pictures, seed=3, steps=1)
    assert found["cot_text"] == text == WRITTEN
    assert (found["height"], found["width"]) == size
    assert distance(picture, alone) <= LEVELS
    if user.sees_text:
        texts = run.texts["HunyuanImage3Generate"]
        assert [text for text in texts if "encoded" in text] == ["3 reference pictures encoded"]
        reused, total = saving(texts)
        assert 0 < reused < total


def test_question_about_a_picture(user: User, small_instruct: Path) -> None:
    picture = pixels(7)
    changes = {"HunyuanImage3Ask": {**system_prompt(None), "do_sample": "greedy", "max_new_tokens": 12}}
    graph = graph_of("image_question", SMALL, changes)
    load_images(user, graph, [png(picture)])
    run = user.run(graph)
    question = graph[node_of(graph, "HunyuanImage3Ask")]["inputs"]["question"]
    answer = Reference(small_instruct).answer(question, [picture], max_new_tokens=12)
    shown = user.shown(graph, run, "HunyuanImage3Ask")
    assert shown.startswith(answer) and "reached max_new_tokens (12)" in shown
    if user.sees_text:
        *live, last = run.texts["HunyuanImage3Ask"]
        assert last == shown and any(text and answer.startswith(text.strip()) for text in live)


def distil_graph(**sampler: Any) -> Graph:
    changes = {"HunyuanImage3Rewrite": {**system_prompt(None), **GREEDY}, "HunyuanImage3Encode": system_prompt(None)}
    return graph_of("distil_8_steps", DISTIL, {**changes, "KSampler": {"seed": 5, **sampler}})


@pytest.mark.usefixtures("needs_flow")
def test_distil_draws_in_eight_steps(user: User, small_distil: Path) -> None:
    graph = distil_graph()
    picture, found, run = user.draw(graph)
    assert run.progress["KSampler"][-1] == (8, 8)
    size = (found["height"], found["width"])
    alone = Reference(small_distil).picture(found["prompt"], size, seed=5, steps=8, cfg=2.5)
    assert distance(picture, alone) <= LEVELS


@pytest.mark.usefixtures("needs_flow")
def test_cfg_on_a_distilled_checkpoint_is_one_sentence(user: User) -> None:
    run = user.client.run(distil_graph(cfg=2.5))
    assert run.error == (
        "small-distil is distilled and has no unconditional branch; set cfg to 1.0 and use HunyuanImage-3.0 Guidance for its strength."
    )
