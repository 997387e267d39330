"""Edits of scenes and the instructions for them: one or two pictures and a wish, and the scene that answers it.

An answer keeps the aspect of image 1, and everything that the wish does not name. Imports the standard library and its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from .captions import listed, named, typed, unplaced
from .scenes import BACKGROUNDS, COLOURS, KINDS, POSITIONS, SIZES, Scene, SceneError, SceneObject, combinations_of, is_unseen, make_scene, random_scene
from .words import LANGUAGES, Language, LanguageName

CHANGES = {"recolour": ("colour", COLOURS), "resize": ("size", SIZES), "move": ("position", POSITIONS), "reshape": ("kind", KINDS)}
"""Edits that change one attribute of one object: which, and to what."""
ONE_PICTURE = (*CHANGES, "add", "remove", "repaint")
TWO_PICTURES = ("shape_and_colour", "colour_and_shape", "bring", "backdrop")


@dataclass(frozen=True)
class Edit:
    """`before` is the object that the wish points at, `after` what it becomes or what is new; None where there is none."""

    name: str
    sources: tuple[Scene, ...]
    result: Scene
    before: SceneObject | None = None
    after: SceneObject | None = None


def change(name: str, scene: Scene, target: SceneObject, value: str) -> Edit:
    """One of CHANGES. Raises SceneError when the result cannot be drawn or is the same scene."""
    after = replace(target, **{CHANGES[name][0]: value})
    return _edit(name, (scene,), _swapped(scene, target, after), target, after)


def add(scene: Scene, thing: SceneObject) -> Edit:
    """One more object. Raises SceneError when there is no room for it."""
    return _edit("add", (scene,), make_scene((*scene.objects, thing), scene.background, scene.aspect), None, thing)


def remove(scene: Scene, target: SceneObject) -> Edit:
    """One object less. Raises SceneError when it is the only one."""
    left = [thing for thing in scene.objects if thing != target]
    return _edit("remove", (scene,), make_scene(left, scene.background, scene.aspect), target, None)


def repaint(scene: Scene, background: str) -> Edit:
    """Another background. Raises SceneError when it is the same or hides an object."""
    return _edit("repaint", (scene,), replace(scene, background=background))


def shape_and_colour(first: Scene, second: Scene) -> Edit:
    """The only object of image 1 in the colour of the only one of image 2. Raises SceneError like `change`."""
    return _mixed("shape_and_colour", first, second, "colour")


def colour_and_shape(first: Scene, second: Scene) -> Edit:
    """The only object of image 1 as the kind of the only one of image 2. Raises SceneError like `change`."""
    return _mixed("colour_and_shape", first, second, "kind")


def bring(first: Scene, second: Scene, target: SceneObject) -> Edit:
    """An object of image 2, at its place, in image 1. Raises SceneError when there is no room for it."""
    return _edit("bring", (first, second), make_scene((*first.objects, target), first.background, first.aspect), target, target)


def backdrop(first: Scene, second: Scene) -> Edit:
    """Image 1 on the background of image 2. Raises SceneError like `repaint`."""
    return _edit("backdrop", (first, second), replace(first, background=second.background))


def _mixed(name: str, first: Scene, second: Scene, attribute: str) -> Edit:
    if len(first.objects) > 1 or len(second.objects) > 1:
        raise SceneError(f"{name} mixes two pictures with one object each; choose such scenes.")
    (before,), (other,) = first.objects, second.objects
    after = replace(before, **{attribute: getattr(other, attribute)})
    return _edit(name, (first, second), _swapped(first, before, after), before, after)


def _swapped(scene: Scene, target: SceneObject, after: SceneObject) -> Scene:
    return make_scene([after if thing == target else thing for thing in scene.objects], scene.background, scene.aspect)


def _edit(name: str, sources: tuple[Scene, ...], result: Scene, before: SceneObject | None = None, after: SceneObject | None = None) -> Edit:
    if result == sources[0]:
        raise SceneError(f"{name} leaves the picture as it is; choose another value.")
    return Edit(name, sources, result, before, after)


def instruction(edit: Edit, language: LanguageName, rng: Random) -> str:
    """The wish in words; the phrasing and how it is typed are drawn."""
    words = LANGUAGES[language]
    slots = {"background": words.colours[edit.result.background]}
    if edit.before is not None:
        slots["target"] = _pointed_at(edit.before, edit.sources[-1], words)
    if (after := edit.after) is not None:
        slots |= {"colour": words.colours[after.colour], "size": words.sizes[after.size], "kind": words.kinds[after.kind], "new": unplaced(after, words)}
        slots |= {"to": words.targets[after.position], "at": words.spots[after.position]}
    return typed(rng.choice(words.edits[edit.name]).format(**slots), words, rng)


def think_about(edit: Edit, language: LanguageName) -> str:
    """A short thought: what the pictures show, what changes."""
    words = LANGUAGES[language]
    text = "".join(words.shows.format(number=number, objects=listed(scene.objects, words)) for number, scene in enumerate(edit.sources, start=1))
    if edit.result.background != edit.sources[0].background:
        text += words.backdrop.format(background=words.colours[edit.result.background])
    if edit.after is not None and edit.before in edit.sources[0].objects:
        text += words.becomes.format(target=_pointed_at(edit.before, edit.sources[0], words), object=named(edit.after, words))
    elif edit.after is not None:
        text += words.appears.format(object=named(edit.after, words))
    elif edit.before is not None:
        text += words.goes.format(target=_pointed_at(edit.before, edit.sources[0], words))
    return text + words.rest


def _pointed_at(target: SceneObject, scene: Scene, words: Language) -> str:
    """The shortest name that fits no other object of the scene: the kind, or colour and kind."""
    kind = words.kinds[target.kind]
    alike = sum(thing.kind == target.kind for thing in scene.objects)
    return kind if alike == 1 else words.space.join((words.colours[target.colour], kind))


def random_edit(seed: int, *, unseen: bool, pictures: int) -> Edit:
    """The edit of a seed with 1 or 2 source pictures; all objects, before and after, are from one side of the split."""
    rng = Random(f"edit/{pictures}/{seed}")
    name = rng.choice(ONE_PICTURE if pictures == 1 else TWO_PICTURES)
    while True:
        try:
            edit = _DRAWN[name](rng, unseen) if name in _DRAWN else _drawn_change(name, rng, unseen)
        except SceneError:  # no such scene, or no change: draw again
            continue
        if all(is_unseen(thing) == unseen for thing in edit.result.objects):
            return edit


def _scene(rng: Random, unseen: bool, count: int | None = None) -> Scene:
    return random_scene(rng.getrandbits(48), unseen=unseen, count=count)


def _drawn_change(name: str, rng: Random, unseen: bool) -> Edit:
    scene = _scene(rng, unseen)
    return change(name, scene, rng.choice(scene.objects), rng.choice(CHANGES[name][1]))


def _drawn_removal(rng: Random, unseen: bool) -> Edit:
    scene = _scene(rng, unseen, rng.randint(2, 3))
    return remove(scene, rng.choice(scene.objects))


def _drawn_gift(rng: Random, unseen: bool) -> Edit:
    second = _scene(rng, unseen)
    return bring(_scene(rng, unseen, rng.randint(1, 2)), second, rng.choice(second.objects))


_DRAWN: dict[str, Callable[[Random, bool], Edit]] = {
    "add": lambda rng, unseen: add(_scene(rng, unseen, rng.randint(1, 2)), rng.choice(combinations_of(unseen=unseen))),
    "remove": _drawn_removal,
    "repaint": lambda rng, unseen: repaint(_scene(rng, unseen), rng.choice(BACKGROUNDS)),
    "shape_and_colour": lambda rng, unseen: shape_and_colour(_scene(rng, unseen, 1), _scene(rng, unseen, 1)),
    "colour_and_shape": lambda rng, unseen: colour_and_shape(_scene(rng, unseen, 1), _scene(rng, unseen, 1)),
    "bring": _drawn_gift,
    "backdrop": lambda rng, unseen: backdrop(_scene(rng, unseen), _scene(rng, unseen)),
}
