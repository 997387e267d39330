"""Suites are fair, the painter paints as the nodes do, and the figures say what was there: all right, all wrong, or left as it was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from lone_engine import Events, lone_engine

from phase_parallel.models.hunyuan_image_3.engine import Engine
from phase_parallel.models.hunyuan_image_3.loading import LoadOptions
from phase_parallel.nodes.node_generate import DrawSettings, draw
from phase_parallel.nodes.references import prepare_references
from phase_parallel.nodes.text_stage import Sampling, TextWish, run_text_stage
from phase_parallel.parallel.collectives import Communicator
from phase_parallel.parallel.groups import ProcessGroups
from phase_parallel.parallel.plan import make_plan
from phase_parallel.train.captions import recaption
from phase_parallel.train.drawing import render
from phase_parallel.train.evaluation import NOTHING_RIGHT, evaluate, mark
from phase_parallel.train.figures import figures, grouped, language_gap
from phase_parallel.train.painter import TEXT_TOKENS, Painter, Steps, Wish, Written, to_uint8
from phase_parallel.train.scenes import is_unseen, size_of
from phase_parallel.train.suites import SUITES, Item, Suite, suite_items

DRAWING = [suite for suite in SUITES if suite != "ratio"]


class PerfectPainter:
    """Writes and draws by rule what is wanted."""

    def __init__(self, items: list[Item]) -> None:
        self._wanted = {item.wish.seed: item for item in items}

    def write(self, wish: Wish) -> Written:
        item = self._wanted[wish.seed]
        text = "" if wish.task == "image" else recaption(item.wanted, item.language)
        return Written(f"<recaption>{text}</recaption>" if text else "", text, size_of(item.wanted.aspect))

    def draw(self, wish: Wish, written: Written) -> np.ndarray:
        return render(self._wanted[wish.seed].wanted, *written.size, wish.seed)


class LazyPainter(PerfectPainter):
    """Gives the first picture back."""

    def draw(self, wish: Wish, written: Written) -> np.ndarray:
        return wish.pictures[0]


def test_suites_hold_unseen_scenes_of_both_languages() -> None:
    for suite in SUITES:
        items = suite_items(suite, 20)
        assert all(is_unseen(thing) for item in items for thing in item.wanted.objects)
        assert [item.language for item in items] == ["english", "chinese"] * 10
        assert all(item.wish.prompt.isascii() == (item.language == "english") for item in items)
        assert len({item.wish.prompt for item in items}) >= 15


def test_longer_suites_begin_with_shorter_ones() -> None:
    long, short = suite_items("edit2", 6), suite_items("edit2", 3)
    assert [replace(item.wish, pictures=()) for item in long[:3]] == [replace(item.wish, pictures=()) for item in short]


def test_both_languages_ask_for_the_same_scenes() -> None:
    items = suite_items("t2i", 20)
    assert [item.wanted for item in items[::2]] == [item.wanted for item in items[1::2]]


def test_distil_is_asked_what_instruct_is_asked() -> None:
    assert [item.wish for item in suite_items("distil", 10)] == [item.wish for item in suite_items("t2i", 10)]


def test_prompts_of_ratio_name_the_aspect() -> None:
    words = {"square": ("square", "方幅"), "wide": ("wide", "宽幅"), "tall": ("tall", "竖幅")}
    items = suite_items("ratio", 60)
    assert {item.wanted.aspect for item in items} == set(words)
    for item in items:
        assert any(word in item.wish.prompt for word in words[item.wanted.aspect]), item.wish.prompt


@pytest.mark.parametrize("suite", SUITES)
def test_what_is_wanted_scores_everything(suite: Suite) -> None:
    items = suite_items(suite, 12)
    outcome = evaluate(PerfectPainter(items), items, judging=True)
    found = {name: value for name, value in figures(outcome.rows).items() if value is not None}
    assert found and set(found.values()) == {100.0}
    assert language_gap(suite, outcome.rows) == 0


@pytest.mark.parametrize("suite", ["edit1", "edit2"])
def test_a_picture_left_as_it_was_is_no_edit(suite: Suite) -> None:
    items = suite_items(suite, 16)
    found = figures(evaluate(LazyPainter(items), items, judging=True).rows)
    assert found["done"] == 0 and found["exact"] == 0
    assert found["attributes"] > 50, "most of a picture is right before the edit, which is why this share alone says little"


def test_an_object_that_stays_beside_its_copy_is_no_edit() -> None:
    item = next(item for item in suite_items("edit1", 60) if item.edit.name == "move")
    both = render(item.wanted, *size_of(item.wanted.aspect), 0)
    source = item.wish.pictures[0]
    both = np.where((source != source[:1, :1]).any(-1, keepdims=True), source, both)
    written = Written("", recaption(item.wanted, item.language), size_of(item.wanted.aspect))
    assert mark(item, written, both).done is False


def test_a_recaption_of_another_scene_is_wrong_both_ways() -> None:
    first, second = suite_items("think", 3)[0::2]
    other = Written("", recaption(second.wanted, "english"), size_of(first.wanted.aspect))
    row = mark(first, other, render(first.wanted, *size_of(first.wanted.aspect), 0))
    assert row.picture.exact and not row.recaption.exact and row.recaption == row.agreement


def test_a_text_that_is_no_recaption_agrees_with_nothing() -> None:
    (item,) = suite_items("think", 1)
    row = mark(item, Written("<think>A</think>", "A circle.", (256, 256)), render(item.wanted, *size_of(item.wanted.aspect), 0))
    assert row.recaption == row.agreement == NOTHING_RIGHT and "cannot be read" in row.sentence


def test_the_wrong_proportions_are_noticed() -> None:
    items = suite_items("ratio", 8)

    class Square(PerfectPainter):
        def write(self, wish: Wish) -> Written:
            return Written("", "", (256, 256))

    rows = evaluate(Square(items), items, judging=True).rows
    wanted = [item.wanted.aspect == "square" for item in items]
    assert [row.size_right for row in rows] == wanted and figures(rows)["ratio"] == 100 * sum(wanted) / 8


def test_groups_and_gap_follow_their_rows() -> None:
    items = suite_items("t2i", 4)
    outcome = evaluate(PerfectPainter(items), items, judging=True)
    rows = [replace(row, picture=NOTHING_RIGHT) if row.item.language == "chinese" else row for row in outcome.rows]
    groups = grouped(rows)
    assert {name: (count, values["attributes"]) for name, (count, values) in groups.items()} == {
        "all": (4, 50.0),
        "english": (2, 100.0),
        "chinese": (2, 0.0),
    }
    assert language_gap("t2i", rows) == 100


def test_only_the_judging_rank_has_rows_and_all_have_the_digest() -> None:
    items = suite_items("t2i", 2)
    judging, other = (evaluate(PerfectPainter(items), items, judging=flag) for flag in (True, False))
    assert len(judging.rows) == 2 and not other.rows and judging.digest == other.digest
    assert evaluate(PerfectPainter(items), items[:1], judging=False).digest != judging.digest


def test_rows_become_json() -> None:
    (item,) = suite_items("edit1", 1)
    row = evaluate(PerfectPainter([item]), [item], judging=True).rows[0].to_json()
    assert row["edit"] == item.edit.name and row["done"] is True and row["score"]["picture"]["total"] == 1
    assert row["prompt"] == item.wish.prompt and row["wanted"] == recaption(item.wanted, "english")


@pytest.fixture(scope="module")
def engine(random_mini: Path) -> Iterator[Engine]:
    plan = make_plan("single", world_size=1, rank=0)
    yield Engine.load(random_mini, plan, Communicator(plan, ProcessGroups(plan, {}, None, "gloo")), LoadOptions(), device=torch.device("cpu"))


@pytest.mark.parametrize(("suite", "task", "size"), [("t2i", "off", "width x height"), ("edit2", "think + recaption", "auto")])
def test_the_painter_paints_what_the_nodes_paint(suite: Suite, task: str, size: str, engine: Engine, random_mini: Path) -> None:
    """Text, size and every bit of the picture, as Generate makes them."""
    (item,) = suite_items(suite, 1)
    wish = replace(item.wish, seed=7)
    painter = Painter(engine, random_mini, Steps.of(engine.config, steps=2))
    written = painter.write(wish)
    pixels = painter.draw(wish, written)

    handle = lone_engine(random_mini)
    images = tuple(torch.from_numpy(picture).float()[None] / 255 for picture in wish.pictures)
    height, width = size_of(item.wanted.aspect)
    asked = TextWish(
        wish.prompt, task, "checkpoint default", "", size, width, height, TEXT_TOKENS, wish.seed, Sampling(), images=images, reference_seed=wish.seed
    )
    outcome = run_text_stage(handle, asked, node_id="test", report=None)
    settings = DrawSettings.resolve(handle, steps=2, guidance=0.0, flow_shift=0.0, seed=wish.seed, batch_size=1)
    latents = draw(handle, wish.prompt, None, outcome, prepare_references(handle, images, seed=wish.seed), settings, Events())
    _, decoded = handle.call("vae_decode", {}, {"latents": latents}, node_id="test")
    assert (written.cot_text, written.size) == (outcome.cot_text, (outcome.height, outcome.width))
    saved = np.clip(255.0 * (decoded["pixels"][0] * 0.5 + 0.5).clamp(0, 1).movedim(0, -1).numpy(), 0, 255).astype(np.uint8)
    assert np.array_equal(pixels, saved)


def test_pictures_are_cut_to_whole_levels() -> None:
    decoded = torch.tensor([[[-2.0, -1.0, 0.0, 0.999, 1.0, 3.0]]]).expand(3, -1, -1)
    assert to_uint8(decoded)[0, :, 0].tolist() == [0, 0, 127, 254, 255, 255]


def test_settings_follow_the_checkpoint_unless_given(engine: Engine) -> None:
    own = engine.config.generation
    assert Steps.of(engine.config) == Steps(own.diff_infer_steps, own.diff_guidance_scale, own.flow_shift)
    assert Steps.of(engine.config, steps=3, guidance=0.0) == Steps(3, 0.0, own.flow_shift)
