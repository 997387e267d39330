"""Scenes: what can be drawn, the split of combinations, and the pictures of scenes."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest

from phase_parallel.models.hunyuan_image_3.resolution import ResolutionTable
from phase_parallel.train.drawing import outlines, render
from phase_parallel.train.scenes import (
    ASPECT_ROWS,
    ASPECTS,
    BACKGROUNDS,
    BASE_SIZE,
    COLOURS,
    KINDS,
    PALETTE,
    POSITIONS,
    SIZES,
    Scene,
    SceneError,
    SceneObject,
    combinations_of,
    is_unseen,
    make_scene,
    random_scene,
    size_of,
)

CIRCLE = SceneObject("circle", "red", "small", "centre")


def test_palette_is_clearly_separable() -> None:
    assert min(math.dist(PALETTE[one], PALETTE[other]) for one, other in combinations(PALETTE, 2)) > 100


@pytest.mark.parametrize("aspect", ASPECTS)
def test_an_aspect_is_a_row_of_the_size_table(aspect: str) -> None:
    height, width = size_of(aspect)
    assert ResolutionTable(BASE_SIZE, extra=True).nearest(height, width) == ASPECT_ROWS[aspect]
    assert {"square": height == width, "wide": height < width, "tall": height > width}[aspect]


def test_the_same_seed_is_the_same_scene_and_picture() -> None:
    scene = random_scene(7, unseen=False)
    assert scene == random_scene(7, unseen=False)
    assert np.array_equal(render(scene, 192, 320, 3), render(scene, 192, 320, 3))
    assert not np.array_equal(render(scene, 192, 320, 3), render(scene, 192, 320, 4))


def test_the_split_stays_as_it_was_published() -> None:
    """A checkpoint that was trained yesterday must not have seen what is unseen today."""
    unseen = combinations_of(unseen=True)
    assert (len(combinations_of(unseen=False)), len(unseen)) == (1140, 156)
    assert unseen[0] == SceneObject("circle", "red", "medium", "top left")


def test_unseen_combinations_are_apart_and_cover_every_attribute() -> None:
    seen, unseen = set(combinations_of(unseen=False)), set(combinations_of(unseen=True))
    assert not seen & unseen
    assert len(seen | unseen) == len(KINDS) * len(COLOURS) * len(SIZES) * len(POSITIONS)
    for side in (seen, unseen):
        assert {thing.kind for thing in side} == set(KINDS)
        assert {thing.colour for thing in side} == set(COLOURS)
        assert {thing.size for thing in side} == set(SIZES)
        assert {thing.position for thing in side} == set(POSITIONS)


@pytest.mark.parametrize("unseen", [False, True])
def test_random_scenes_stay_on_their_side_and_hold_everything(unseen: bool) -> None:
    scenes = [random_scene(seed, unseen=unseen) for seed in range(300)]
    assert all(is_unseen(thing) == unseen for scene in scenes for thing in scene.objects)
    assert {scene.background for scene in scenes} == set(BACKGROUNDS)
    assert {(scene.aspect, len(scene.objects)) for scene in scenes} == set(product(ASPECTS, (1, 2, 3)))


def test_equal_scenes_compare_equal_whatever_the_order() -> None:
    star = SceneObject("star", "blue", "small", "top left")
    assert make_scene([CIRCLE, star], "white", "square") == make_scene([star, CIRCLE], "white", "square")
    with pytest.raises(SceneError, match="reading order"):
        Scene((CIRCLE, star), "white", "square")


@pytest.mark.parametrize(
    ("objects", "background", "message"),
    [
        ((), "white", "1 to 3 objects"),
        ((CIRCLE,), "red", "background red"),
        ((replace(CIRCLE, colour="white"),), "white", "cannot be seen"),
        ((replace(CIRCLE, kind="cube"),), "white", "unknown"),
        ((replace(CIRCLE, position="middle"),), "white", "unknown"),
        ((CIRCLE, replace(CIRCLE, position="top")), "white", "share kind and colour"),
        ((replace(CIRCLE, size="large"), SceneObject("star", "blue", "large", "top")), "white", "would touch"),
    ],
)
def test_what_cannot_be_drawn_is_refused(objects: tuple[SceneObject, ...], background: str, message: str) -> None:
    with pytest.raises(SceneError, match=message):
        make_scene(objects, background, "square")


def test_shapes_never_touch_each_other_or_the_frame() -> None:
    """Every pixel that is no background belongs to the share that its object alone covers."""
    for seed in range(60):
        scene = random_scene(seed, unseen=False, count=3)
        height, width = size_of(scene.aspect)
        covered = [np.any(render(replace(scene, objects=(thing,)), height, width, seed) != PALETTE[scene.background], -1) for thing in scene.objects]
        assert max(np.sum(covered, 0).flat) == 1
        assert not any(mask[[0, -1]].any() or mask[:, [0, -1]].any() for mask in covered)


def test_each_place_is_moved_in_its_own_way() -> None:
    """Else a model would learn that a whole picture moves at once."""
    left, right = (np.flatnonzero(np.any(half != PALETTE["white"], -1).any(1))[0] for half in np.split(_two_discs(), 2, 1))
    assert left != right


def _two_discs() -> np.ndarray:
    discs = [replace(CIRCLE, position="left"), SceneObject("circle", "blue", "small", "right")]
    return render(make_scene(discs, "white", "square"), 1024, 1024, 1)


def test_colours_are_exact_and_edges_are_mixed() -> None:
    pixels = render(make_scene([CIRCLE], "white", "square"), 256, 256, 0)
    assert tuple(pixels[128, 128]) == PALETTE["red"]
    assert tuple(pixels[0, 0]) == PALETTE["white"]
    mixed = np.any(pixels != PALETTE["red"], -1) & np.any(pixels != PALETTE["white"], -1)
    assert 30 < mixed.sum() < 300


def test_other_objects_do_not_move_what_stays() -> None:
    star = SceneObject("star", "blue", "small", "top left")
    alone = render(make_scene([CIRCLE], "white", "wide"), 192, 320, 5)
    together = render(make_scene([CIRCLE, star], "white", "wide"), 192, 320, 5)
    assert np.array_equal(alone[80:], together[80:])


@pytest.mark.parametrize("kind", KINDS)
def test_outlines_fill_their_box(kind: str) -> None:
    corners = np.array(outlines(kind)[0])
    assert np.allclose(corners.max(0) + corners.min(0), 0)
    assert np.ptp(corners, 0).max() == pytest.approx(1)
