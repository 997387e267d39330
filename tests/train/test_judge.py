"""The judge finds what was drawn, also through noise and blur, says what is wrong, and does not guess."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest
from PIL import Image
from scipy.ndimage import gaussian_filter

from phase_parallel.train.drawing import render
from phase_parallel.train.judge import NAMED, Score, judge, tell
from phase_parallel.train.scenes import (
    BACKGROUNDS,
    COLOURS,
    KINDS,
    PALETTE,
    POSITIONS,
    SIZES,
    Scene,
    SceneError,
    SceneObject,
    make_scene,
    random_scene,
    size_of,
)
from phase_parallel.train.seeing import see
from phase_parallel.train.shape_measures import AREA, IDEALS, measure

ALL_RIGHT = Score(1, 1, 1, 1, 1, 1)
SCENE = make_scene([SceneObject("circle", "red", "medium", "left"), SceneObject("star", "blue", "large", "right")], "white", "square")


def picture(scene: Scene, seed: int = 0) -> np.ndarray:
    return render(scene, *size_of(scene.aspect), seed)


def noisy(pixels: np.ndarray, seed: int) -> np.ndarray:
    return np.clip(pixels + np.random.default_rng(seed).normal(0, 12, pixels.shape), 0, 255).astype(np.uint8)


def blurred(pixels: np.ndarray, radius: float) -> np.ndarray:
    return np.rint(gaussian_filter(pixels.astype(np.float32), (radius, radius, 0))).astype(np.uint8)


def squeezed(pixels: np.ndarray) -> np.ndarray:
    """Through a JPEG of low quality, with colours a little off."""
    shifted = np.clip(pixels * np.array([0.96, 1.04, 1.0]) + np.array([8, -8, 6]), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(shifted).save(file, "JPEG", quality=50)
    return np.asarray(Image.open(file))


def spoilt(pixels: np.ndarray, seed: int) -> np.ndarray:
    return noisy(blurred(pixels, 1.5), seed)


@pytest.mark.parametrize(
    ("spoil", "scenes", "allowed"),
    [(lambda pixels, _: pixels, 150, 0), (spoilt, 100, 3), (lambda pixels, _: squeezed(pixels), 50, 0)],
    ids=["clean", "noise and blur", "jpeg and shifted colours"],
)
def test_judge_finds_the_scene(spoil: Callable[[np.ndarray, int], np.ndarray], scenes: int, allowed: int) -> None:
    wrong = []
    for seed in range(scenes):
        scene = random_scene(seed, unseen=seed % 2 == 0)
        verdict = judge(spoil(picture(scene, seed), seed), scene)
        if not verdict.score.exact:
            wrong.append((seed, verdict.sentence))
    assert len(wrong) <= allowed, wrong


@pytest.mark.parametrize("name", NAMED)
def test_a_wrong_attribute_costs_that_attribute_alone(name: str) -> None:
    values = {"kind": KINDS, "colour": COLOURS, "size": SIZES, "position": POSITIONS}[name]
    mutated = 0
    for seed in range(12):
        scene = random_scene(seed, unseen=False)
        target = scene.objects[seed % len(scene.objects)]
        try:
            wrong = replace(target, **{name: values[(values.index(getattr(target, name)) + 1) % len(values)]})
            other = make_scene([wrong if thing == target else thing for thing in scene.objects], scene.background, scene.aspect)
        except SceneError:
            continue
        mutated += 1
        score = judge(picture(other, seed), scene).score
        count = len(scene.objects)
        assert score == replace(ALL_RIGHT, **{name: (count - 1) / count}), (scene, other)
    assert mutated >= 5


def test_a_wrong_background_costs_the_background() -> None:
    for background in BACKGROUNDS[1:]:
        score = judge(picture(replace(SCENE, background=background)), SCENE).score
        assert score == replace(ALL_RIGHT, background=0)


@pytest.mark.parametrize(
    ("objects", "share", "words"),
    [
        (SCENE.objects[:1], 1 / 2, "large blue star (right) is missing"),
        ((*SCENE.objects, SceneObject("cross", "green", "small", "top")), 2 / 3, "small green cross (top) is too much"),
    ],
    ids=["missing", "surplus"],
)
def test_a_wrong_count_costs_every_attribute(objects: tuple[SceneObject, ...], share: float, words: str) -> None:
    verdict = judge(picture(make_scene(objects, "white", "square")), SCENE)
    assert verdict.score == Score(share, share, share, share, 1, 0)
    assert words in verdict.sentence


def test_sentences_say_what_is_wrong() -> None:
    red_star = replace(SCENE.objects[1], colour="red")
    other = make_scene([SCENE.objects[0], red_star], "grey", "square")
    assert judge(picture(SCENE), SCENE).sentence == "As wanted: medium red circle (left), large blue star (right) on white."
    assert judge(picture(other), SCENE).sentence == (
        "Seen: medium red circle (left), large red star (right) on grey; wrong: large blue star (right) has colour red; the background should be white."
    )


def test_an_empty_picture_shows_nothing() -> None:
    pixels = np.full((256, 256, 3), 248, np.uint8)
    verdict = judge(pixels, SCENE)
    assert tell(verdict.sight) == "nothing on white"
    assert verdict.score == Score(0, 0, 0, 0, 1, 0)


def test_noise_is_unclear_and_scores_nothing() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
    verdict = judge(pixels, SCENE)
    assert tell(verdict.sight).startswith("unclear")
    assert verdict.score.total == 0


def drawn(mask: np.ndarray, colour: tuple[int, int, int] = (205, 25, 40)) -> np.ndarray:
    pixels = np.full((256, 256, 3), 248, np.uint8)
    pixels[mask] = colour
    return pixels


Y, X = np.mgrid[:256, :256] - 128


@pytest.mark.parametrize(
    "mask",
    [
        (abs(Y) < 12) & (abs(X) < 40),
        (Y / 20) ** 2 + (X / 34) ** 2 < 1,
        (abs(Y) < 30) & (abs(X) < 30) & ((Y > 0) | (X > 0)),
        (Y**2 + X**2 < 900) & (Y > 0),
        (Y**2 + X**2 < 1600) & (np.cos(3 * np.arctan2(X, -Y)) > np.cos(3 * 0.65)),
        np.abs(Y / 32.0) ** 3.4 + np.abs(X / 32.0) ** 3.4 < 1,
    ],
    ids=["bar", "ellipse", "angle", "half disc", "propeller", "between square and circle"],
)
def test_other_shapes_have_no_name(mask: np.ndarray) -> None:
    (thing,) = see(drawn(mask)).objects
    assert (thing.kind, thing.colour, thing.position) == (None, "red", "centre")


def test_other_colours_and_sizes_have_no_name() -> None:
    disc = Y**2 + X**2
    (brown,) = see(drawn(disc < 900, (110, 75, 45))).objects
    assert (brown.kind, brown.colour) == ("circle", None)
    (huge,) = see(drawn(disc < 80**2)).objects
    assert (huge.kind, huge.size) == ("circle", None)


def test_a_thing_of_many_colours_has_only_a_place() -> None:
    pixels = np.full((256, 256, 3), PALETTE["grey"], np.uint8)
    disc, stripes = Y**2 + X**2 < 900, X // 3 % 2 == 0
    pixels[disc & stripes], pixels[disc & ~stripes] = PALETTE["black"], PALETTE["white"]
    (thing,) = see(pixels).objects
    assert (thing.kind, thing.colour, thing.size, thing.position) == (None, None, None, "centre")


def test_touching_shapes_of_two_colours_are_two() -> None:
    pixels = drawn((abs(Y) < 28) & (abs(X + 28) < 28))
    pixels[(abs(Y) < 28) & (abs(X - 28) < 28)] = (35, 85, 215)
    assert [(thing.kind, thing.colour) for thing in see(pixels).objects] == [("square", "red"), ("square", "blue")]


def test_specks_are_overlooked() -> None:
    pixels = picture(SCENE)
    pixels[5:11, 5:11] = 0
    assert judge(pixels, SCENE).score.exact


@pytest.mark.parametrize("kind", KINDS)
def test_ideal_measures_are_those_of_the_figures(kind: str) -> None:
    scene = make_scene([SceneObject(kind, "black", "large", "centre")], "white", "square")
    cover = (248 - render(scene, 1600, 1600, 0)[..., 0].astype(np.float64)) / (248 - 22)
    found = measure(cover)
    for field in fields(found):
        assert getattr(found, field.name) == pytest.approx(getattr(IDEALS[kind], field.name), abs=3e-3), field.name
    rows, columns = np.flatnonzero((cover > 0.5).any(1)), np.flatnonzero((cover > 0.5).any(0))
    extent = max(np.ptp(rows), np.ptp(columns)) + 1
    assert cover.sum() / extent**2 == pytest.approx(AREA[kind], rel=0.02)


def test_measures_do_not_change_with_blur() -> None:
    star = np.pad((248 - picture(make_scene([SceneObject("star", "black", "small", "centre")], "white", "square"))[..., 0].astype(np.float64)) / 226, 8)
    sharp, soft = measure(star), measure(gaussian_filter(star, 2.0))
    assert soft.fifth == pytest.approx(sharp.fifth, rel=1e-3)
    assert soft.quarter == pytest.approx(sharp.quarter, abs=1e-4)


def test_pictures_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="uint8"):
        see(np.zeros((256, 256, 3), np.float32))
