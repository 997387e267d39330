"""Edits: the result differs from its source exactly as the words say."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from phase_parallel.train.edits import (
    CHANGES,
    ONE_PICTURE,
    TWO_PICTURES,
    Edit,
    add,
    bring,
    change,
    instruction,
    random_edit,
    remove,
    shape_and_colour,
    think_about,
)
from phase_parallel.train.scenes import SceneError, SceneObject, is_unseen, make_scene
from phase_parallel.train.words import LANGUAGES, Language, LanguageName

CIRCLE = SceneObject("circle", "red", "small", "centre")
STAR = SceneObject("star", "blue", "small", "top left")
SCENE = make_scene([CIRCLE, STAR], "white", "square")
BOTH: tuple[LanguageName, ...] = ("english", "chinese")
MANY = [random_edit(seed, unseen=unseen, pictures=pictures) for pictures in (1, 2) for unseen in (False, True) for seed in range(60)]


def wishes(edit: Edit, language: LanguageName) -> set[str]:
    return {instruction(edit, language, Random(seed)) for seed in range(40)}


def test_every_kind_of_edit_is_drawn() -> None:
    assert {edit.name for edit in MANY} == {*ONE_PICTURE, *TWO_PICTURES}
    assert {edit.name for edit in MANY if len(edit.sources) == 2} == set(TWO_PICTURES)


def test_edits_keep_to_their_side_of_the_split_and_to_their_seed() -> None:
    for seed in range(20):
        for unseen in (False, True):
            edit = random_edit(seed, unseen=unseen, pictures=2)
            assert edit == random_edit(seed, unseen=unseen, pictures=2)
            assert all(is_unseen(thing) == unseen for scene in (*edit.sources, edit.result) for thing in scene.objects)


@pytest.mark.parametrize("name", [*ONE_PICTURE, *TWO_PICTURES])
def test_the_result_differs_as_said_and_nowhere_else(name: str) -> None:
    for edit in MANY:
        if edit.name == name:
            check_difference(edit)


def check_difference(edit: Edit) -> None:
    first, result = edit.sources[0], edit.result
    gone, new = set(first.objects) - set(result.objects), set(result.objects) - set(first.objects)
    assert result.aspect == first.aspect
    if edit.name in ("repaint", "backdrop"):
        assert not gone and not new and result.background != first.background
        assert edit.name == "repaint" or result.background == edit.sources[1].background
        return
    assert result.background == first.background
    assert new == ({edit.after} if edit.after else set())
    assert gone == (set() if edit.name in ("add", "bring") else {edit.before})
    attribute = {name: of for name, (of, _) in CHANGES.items()} | {"shape_and_colour": "colour", "colour_and_shape": "kind"}
    if edit.name in attribute:
        differing = {name for name in ("kind", "colour", "size", "position") if getattr(edit.before, name) != getattr(edit.after, name)}
        assert differing == {attribute[edit.name]}
    if len(edit.sources) == 2 and edit.name in attribute:
        assert getattr(edit.after, attribute[edit.name]) == getattr(edit.sources[1].objects[0], attribute[edit.name])


@pytest.mark.parametrize("language", BOTH)
@pytest.mark.parametrize("name", [*ONE_PICTURE, *TWO_PICTURES])
def test_the_words_name_the_change(name: str, language: LanguageName) -> None:
    words = LANGUAGES[language]
    for edit in MANY:
        if edit.name == name:
            wanted = named_in(edit, words)
            assert all(any(word in wish for word in choice) for wish in wishes(edit, language) for choice in wanted)
            thought = think_about(edit, language)
            assert all(words.kinds[thing.kind] in thought for scene in (*edit.sources, edit.result) for thing in scene.objects)


def named_in(edit: Edit, words: Language) -> list[tuple[str, ...]]:
    """What a wish must name; one word of each tuple."""
    if edit.name == "repaint":
        return [(words.colours[edit.result.background],)]
    if edit.name in ("add", "bring"):
        return [(words.kinds[edit.after.kind],)]
    if edit.name in TWO_PICTURES:
        return [("1",), ("2",)]
    target = (words.kinds[edit.before.kind],)
    tables = {"recolour": words.colours, "resize": words.sizes, "reshape": words.kinds}
    if edit.name == "move":
        return [target, (words.spots[edit.after.position], words.targets[edit.after.position])]
    return [target, (tables[edit.name][getattr(edit.after, CHANGES[edit.name][0])],)] if edit.name in tables else [target]


def test_the_words_of_some_edits() -> None:
    edit = change("recolour", SCENE, CIRCLE, "green")
    assert wishes(edit, "english") == {
        "Make the circle green.",
        "make the circle green",
        "Change the colour of the circle to green.",
        "change the colour of the circle to green",
    }
    assert "把圆形变成绿色。" in wishes(edit, "chinese")
    assert "Move the star to the left." in wishes(change("move", SCENE, STAR, "left"), "english")
    assert "add a small blue square at the left" in wishes(add(SCENE, SceneObject("square", "blue", "small", "left")), "english")
    assert "Remove the star." in wishes(remove(SCENE, STAR), "english")
    one, other = make_scene([CIRCLE], "white", "wide"), make_scene([STAR], "pink", "tall")
    mixed = shape_and_colour(one, other)
    assert "The shape of image 1 with the colour of image 2." in wishes(mixed, "english")
    assert mixed.result == make_scene([SceneObject("circle", "blue", "small", "centre")], "white", "wide")
    assert "Add the star of image 2 to image 1." in wishes(bring(one, other, STAR), "english")


def test_an_object_is_named_by_its_colour_where_its_kind_is_not_enough() -> None:
    blue = SceneObject("circle", "blue", "small", "top left")
    edit = remove(make_scene([CIRCLE, blue], "white", "square"), CIRCLE)
    assert "Remove the red circle." in wishes(edit, "english")
    assert "去掉红色圆形。" in wishes(edit, "chinese")
    assert think_about(edit, "english") == (
        "Image 1 shows a small blue circle at the top left and a small red circle in the centre. The red circle goes. Everything else stays."
    )


@pytest.mark.parametrize(
    ("impossible", "message"),
    [
        (lambda: change("recolour", SCENE, CIRCLE, "red"), "as it is"),
        (lambda: change("recolour", SCENE, CIRCLE, "white"), "cannot be seen"),
        (lambda: change("move", SCENE, CIRCLE, "top left"), "would touch"),
        (lambda: remove(make_scene([STAR], "white", "square"), STAR), "1 to 3"),
        (lambda: shape_and_colour(SCENE, SCENE), "one object each"),
    ],
)
def test_edits_that_cannot_be_drawn_are_refused(impossible: Callable[[], Edit], message: str) -> None:
    with pytest.raises(SceneError, match=message):
        impossible()
