"""The user between text and picture, on a real ComfyUI with four ranks: edits what the model wrote, cuts it, cancels it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from graph_runs import LEVELS, User, distance, graph_of, node_of, png
from instruct_runs import GREEDY, SMALL, WRITTEN, load_images, pixels, saving, system_prompt
from reference_run import Reference
from server_client import Graph, Run

pytestmark = [pytest.mark.host, pytest.mark.ranks4, pytest.mark.timeout(1800)]

SOURCE = pixels(11)
EDITED = WRITTEN.replace("dog", "cat")
BEFORE_ENCODE = {"HunyuanImage3Loader", "LoadImage", "HunyuanImage3Rewrite"}


def edit_graph(user: User, cot_text: str | None = None) -> Graph:
    """The edit workflow; `cot_text` replaces the wire from Think / Recaption to Encode, as typed into the widget."""
    graph = graph_of(
        "ti2i_edit",
        SMALL,
        {
            "HunyuanImage3Rewrite": {**GREEDY, **system_prompt(None)},
            "HunyuanImage3Encode": system_prompt(None),
            "KSampler": {"steps": 2, "seed": 5},
        },
    )
    load_images(user, graph, [png(SOURCE)])
    if cot_text is not None:
        graph[node_of(graph, "HunyuanImage3Encode")]["inputs"]["cot_text"] = cot_text
    return graph


@pytest.fixture(scope="module")
def wired(user: User, needs_flow: None) -> tuple[np.ndarray, Run]:
    """Text wired straight into Encode, in a fresh engine."""
    picture, _, run = user.draw(edit_graph(user))
    return picture, run


def encodings(run: Run) -> list[str]:
    return [text for texts in run.texts.values() for text in texts if "encoded" in text]


@pytest.mark.usefixtures("needs_flow")
def test_text_and_picture_share_one_encoding(user: User, wired: tuple[np.ndarray, Run]) -> None:
    _, run = wired
    assert user.shown(edit_graph(user), run, "PreviewAny") == WRITTEN
    assert encodings(run) == ["1 reference picture encoded"], "the text needs it first, the sampler finds it"
    assert encodings(run)[0] in run.texts["HunyuanImage3Rewrite"]
    reused, total = saving(run.texts["KSampler"])
    assert 0 < reused < total


@pytest.mark.usefixtures("needs_flow")
def test_unedited_text_gives_the_same_picture(user: User, wired: tuple[np.ndarray, Run]) -> None:
    picture, _, run = user.draw(edit_graph(user, WRITTEN))
    assert np.array_equal(picture, wired[0])
    assert set(run.cached) >= BEFORE_ENCODE


@pytest.mark.usefixtures("needs_flow")
def test_one_edited_word_runs_only_what_follows(user: User, wired: tuple[np.ndarray, Run], small_instruct: Path) -> None:
    picture, found, run = user.draw(edit_graph(user, EDITED))
    assert found["cot_text"] == EDITED
    assert set(run.cached) >= BEFORE_ENCODE
    assert not {"HunyuanImage3Encode", "KSampler", "VAEDecode", "SaveImage"} & set(run.cached)
    assert encodings(run) == [], "the ranks still hold the picture"
    edited, total = saving(run.texts["KSampler"])
    whole, _ = saving(wired[1].texts["KSampler"])
    assert 0 < edited < whole < total, "what stands before the edited word is not computed again"
    reference = Reference(small_instruct)
    alone = reference.picture(
        found["prompt"], (found["height"], found["width"]), seed=5, steps=2, cfg=2.5, cot_text=EDITED,
        references=reference.references([SOURCE], 0),
    )  # fmt: skip
    assert distance(picture, alone) <= LEVELS
    assert distance(picture, wired[0]) > LEVELS


@pytest.mark.usefixtures("needs_flow")
def test_cut_text_says_so_and_still_gives_a_picture(user: User, small_instruct: Path) -> None:
    graph = graph_of(
        "t2i_think_recaption",
        SMALL,
        {
            "HunyuanImage3Rewrite": {**GREEDY, **system_prompt(None), "max_new_tokens": 3},
            "HunyuanImage3Encode": system_prompt(None),
            "KSampler": {"steps": 1, "seed": 5},
        },
    )
    picture, found, run = user.draw(graph)
    assert found["cot_text"] == "<think>qui</think>"
    said = user.shown(graph, run, "HunyuanImage3Rewrite")
    assert "reached max_new_tokens (3)" in said and run.texts["HunyuanImage3Rewrite"][-1] == said
    alone = Reference(small_instruct).picture(
        found["prompt"], (found["height"], found["width"]), seed=5, steps=1, cfg=2.5, cot_text=found["cot_text"]
    )
    assert distance(picture, alone) <= LEVELS


def test_cancel_while_text_is_written(user: User) -> None:
    """The small checkpoint never ends this answer, so only the cancel can."""

    def question(limit: int) -> Graph:
        asked = {**system_prompt(None), "do_sample": "greedy", "max_new_tokens": limit}
        graph = graph_of("image_question", SMALL, {"HunyuanImage3Ask": asked})
        load_images(user, graph, [png(SOURCE)])
        return graph

    run = user.client.run(question(3000), cancel_at=("HunyuanImage3Ask", 4))
    assert run.error == "interrupted"
    assert 4 <= run.steps("HunyuanImage3Ask") < 1500
    after = user.run(question(8))
    assert run.steps("HunyuanImage3Ask") >= 4 and after.steps("HunyuanImage3Ask") == 8
    assert "reached max_new_tokens (8)" in user.shown(question(8), after, "HunyuanImage3Ask")
