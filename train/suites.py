"""What a checkpoint is examined with: suites of wishes over unseen scenes, each by its number alone, every second one in Chinese.

Imports numpy, the standard library and its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

from .captions import caption
from .drawing import render
from .edits import Edit, instruction, random_edit
from .painter import Wish
from .scenes import Scene, random_scene, size_of
from .words import LanguageName

Suite = Literal["t2i", "think", "ratio", "edit1", "edit2", "distil"]
SUITES: tuple[Suite, ...] = get_args(Suite)
WRITES_ONLY: tuple[Suite, ...] = ("ratio",)
"""No picture is drawn."""
DISTIL_STEPS = 8
_FIRST_SCENE = 900_000
"""Scenes are drawn by seeds from here on; the objects in them are unseen whatever the seed."""


@dataclass(frozen=True)
class Item:
    """One wish and the scene that answers it. `meaning`: the prompt in English; `edit`: what was asked to change, for wishes about pictures."""

    suite: Suite
    number: int
    language: LanguageName
    wanted: Scene
    wish: Wish
    meaning: str
    edit: Edit | None = None


def suite_items(suite: Suite, count: int) -> list[Item]:
    """The first `count` items of a suite; a longer list begins with the shorter one."""
    return [_MAKERS[suite](suite, number) for number in range(count)]


def suites_for(kind: Literal["base", "instruct", "distil"]) -> tuple[Suite, ...]:
    """The suites that a checkpoint is made for."""
    return {"base": ("t2i", "ratio"), "instruct": ("t2i", "think", "ratio", "edit1", "edit2"), "distil": ("distil",)}[kind]


def _language(number: int) -> LanguageName:
    return "chinese" if number % 2 else "english"


def _scene(number: int) -> Scene:
    """The same ones in every suite, so that suites can be compared. Two languages share each scene."""
    return random_scene(_FIRST_SCENE + number // 2, unseen=True)


def _in_both(say: Callable[[LanguageName, Random], str], suite: Suite, number: int) -> tuple[str, str]:
    """What `say` says in the language of the item, and in English, with the same phrasing."""
    return say(_language(number), Random(f"judge/{suite}/{number}")), say("english", Random(f"judge/{suite}/{number}"))


def _text_to_image(suite: Suite, number: int) -> Item:
    """The size of the scene's aspect is given, nothing is written. `distil` asks for what `t2i` asks for."""
    scene, language = _scene(number), _language(number)
    prompt, meaning = _in_both(lambda words, rng: caption(scene, words, rng), "t2i", number)
    return Item(suite, number, language, scene, Wish(prompt, "image", size_of(scene.aspect), number), meaning)


def _think(suite: Suite, number: int) -> Item:
    """Thought and recaption first, then a size of the model's own choice."""
    scene, language = _scene(number), _language(number)
    prompt, meaning = _in_both(lambda words, rng: caption(scene, words, rng), suite, number)
    return Item(suite, number, language, scene, Wish(prompt, "think_recaption", None, number), meaning)


def _ratio(suite: Suite, number: int) -> Item:
    """The prompt names the aspect; only the size is chosen."""
    scene, language = _scene(number), _language(number)
    prompt, meaning = _in_both(lambda words, rng: caption(scene, words, rng, name_aspect=True), suite, number)
    return Item(suite, number, language, scene, Wish(prompt, "image", None, number), meaning)


def _edit(suite: Suite, number: int) -> Item:
    """As the pack's graphs do it: one picture keeps its size, with two the model chooses."""
    pictures = 1 if suite == "edit1" else 2
    edit, language = random_edit(_FIRST_SCENE + number, unseen=True, pictures=pictures), _language(number)
    sources = tuple(render(scene, *size_of(scene.aspect), 2 * number + place) for place, scene in enumerate(edit.sources))
    size = size_of(edit.sources[0].aspect) if pictures == 1 else None
    prompt, meaning = _in_both(lambda words, rng: instruction(edit, words, rng), suite, number)
    return Item(suite, number, language, edit.result, Wish(prompt, "think_recaption", size, number, sources), meaning, edit)


_MAKERS: dict[Suite, Callable[[Suite, int], Item]] = {
    "t2i": _text_to_image,
    "distil": _text_to_image,
    "think": _think,
    "ratio": _ratio,
    "edit1": _edit,
    "edit2": _edit,
}
