"""Texts about scenes, English and Chinese: captions as people write them, thoughts, and recaptions that can be read back into a scene.

A caption may leave out what is usual: a medium size, the centre, a white background, a square picture. Imports the standard library and its neighbours.
"""

from __future__ import annotations

import re
from random import Random
from typing import TypeVar

from .scenes import Scene, SceneError, SceneObject, make_scene
from .words import LANGUAGES, Language, LanguageName

USUAL_SIZE, USUAL_POSITION, USUAL_BACKGROUND, USUAL_ASPECT = "medium", "centre", "white", "square"
Key = TypeVar("Key")
TYPED_PROPERLY = 0.7
_CHINESE_SIGN = re.compile("[一-鿿]")


class CaptionError(ValueError):
    """A text that describes no scene."""


def caption(scene: Scene, language: LanguageName, rng: Random, *, name_aspect: bool = False) -> str:
    """One of the ways to ask for a scene: the phrasing, whether the usual is left out, whether "square" is said (`name_aspect`: it is), and how it is
    typed are drawn."""
    words = LANGUAGES[language]
    phrasing, brief = rng.choice(words.captions), rng.random() < 0.5
    names_aspect = name_aspect or scene.aspect != USUAL_ASPECT or rng.random() < 0.3
    names_background = scene.background != USUAL_BACKGROUND or not brief
    slots = {
        **_counted(words, len(scene.objects)),
        **{part: getattr(words, part).format(aspect=words.aspects[scene.aspect]) if names_aspect else "" for part in ("format", "tail", "make")},
        "on": words.on.format(background=words.colours[scene.background]) if names_background else "",
        "objects": listed(scene.objects, words, brief=brief),
    }
    return typed(phrasing.format(**slots, Objects=capital(slots["objects"])), words, rng)


def think_text(scene: Scene, language: LanguageName) -> str:
    """A short thought that names every attribute."""
    words = LANGUAGES[language]
    text = words.think_opening.format(**_counted(words, len(scene.objects)))
    for ordinal, thing in zip(words.ordinals, scene.objects, strict=False):
        text += words.think_object.format(ordinal=ordinal, object=named(thing, words))
    return text + words.think_closing.format(background=words.colours[scene.background], aspect=words.aspects[scene.aspect])


def recaption(scene: Scene, language: LanguageName) -> str:
    """The complete description, in one form only; `parse_recaption` reads it back."""
    words = LANGUAGES[language]
    head = words.recaption_opening.format(
        aspect=words.aspects[scene.aspect], background=words.colours[scene.background], **_counted(words, len(scene.objects))
    )
    return head + words.between.join(named(thing, words) for thing in scene.objects) + words.stop


def parse_recaption(text: str) -> Scene:
    """The scene of a recaption in either language. Raises CaptionError when the text is no recaption or its scene cannot be drawn."""
    language: LanguageName = "chinese" if _CHINESE_SIGN.search(text) else "english"
    words = LANGUAGES[language]
    text = words.space.join(text.split())
    opening = _reader(words.recaption_opening, words).match(text)
    if opening is None or not text.endswith(words.stop):
        raise CaptionError(f'"{text}" does not have the form of a recaption; compare it with train/words.py.')
    parts = text[opening.end() : -len(words.stop)].split(words.between)
    reader = _reader(words.placed, words)
    objects = [_object(part, reader, words) for part in parts]
    if len(objects) != _key(_counts(words), opening["count"]):
        raise CaptionError(f'"{text}" says {opening["count"]} but describes {len(objects)}; they must agree.')
    try:
        return make_scene(objects, _key(words.colours, opening["background"]), _key(words.aspects, opening["aspect"]))
    except SceneError as error:
        raise CaptionError(f'"{text}" cannot be drawn: {error}') from error


def named(thing: SceneObject, words: Language, *, brief: bool = False) -> str:
    """An object with all attributes, or `brief`: without its size and place where they are the usual ones."""
    size = "" if brief and thing.size == USUAL_SIZE else words.sizes[thing.size]
    text = words.space.join(word for word in (size, words.colours[thing.colour], words.kinds[thing.kind]) if word)
    form = words.alone if brief and thing.position == USUAL_POSITION else words.placed
    return form.format(article=_article(text, words), thing=text, spot=words.spots[thing.position])


def unplaced(thing: SceneObject, words: Language) -> str:
    """An object without its place."""
    text = words.space.join((words.sizes[thing.size], words.colours[thing.colour], words.kinds[thing.kind]))
    return words.alone.format(article=_article(text, words), thing=text)


def listed(objects: tuple[SceneObject, ...], words: Language, *, brief: bool = False) -> str:
    """The objects in a row: "a, b and c"."""
    *first, last = [named(thing, words, brief=brief) for thing in objects]
    return words.comma.join(first) + words.last + last if first else last


def capital(text: str) -> str:
    """The same with a capital first letter."""
    return text[:1].upper() + text[1:]


def typed(text: str, words: Language, rng: Random) -> str:
    """A sentence as it is, or now and then as people type it: without a capital and a full stop."""
    if rng.random() < TYPED_PROPERLY:
        return text
    return text[:1].lower() + text[1:].removesuffix(words.stop)


def _article(text: str, words: Language) -> str:
    return words.articles[-1] if text[0] in "aeiou" else words.articles[0]


def _counted(words: Language, count: int) -> dict[str, str]:
    number = words.counts[count - 1]
    return {"count": number, "Count": capital(number), "noun": words.nouns[count - 1]}


def _counts(words: Language) -> dict[int, str]:
    return {number: capital(word) for number, word in enumerate(words.counts, start=1)}


def _key(table: dict[Key, str], word: str) -> Key:
    return next(key for key, value in table.items() if value == word)


def _reader(form: str, words: Language) -> re.Pattern[str]:
    """Turns a sentence with slots into a pattern whose groups are the words of the slots."""
    tables = {"size": words.sizes, "colour": words.colours, "kind": words.kinds}
    thing = re.escape(words.space).join(f"(?P<{name}>{_any(table)})" for name, table in tables.items())
    slots = {
        "aspect": f"(?P<aspect>{_any(words.aspects)})",
        "background": f"(?P<background>{_any(words.colours)})",
        "Count": f"(?P<count>{_any(_counts(words))})",
        "noun": f"(?:{'|'.join(sorted(set(words.nouns), key=len, reverse=True))})",
        "article": f"(?:{'|'.join(words.articles)})",
        "thing": thing,
        "spot": f"(?P<spot>{_any(words.spots)})",
    }
    pattern = re.escape(form)
    for name, part in slots.items():
        pattern = pattern.replace(re.escape("{" + name + "}"), part)
    return re.compile(pattern)


def _any(table: dict[Key, str]) -> str:
    return "|".join(re.escape(word) for word in sorted(table.values(), key=len, reverse=True))


def _object(text: str, reader: re.Pattern[str], words: Language) -> SceneObject:
    found = reader.fullmatch(text)
    if found is None:
        raise CaptionError(f'"{text}" is not the description of one object; it needs size, colour, kind and place.')
    return SceneObject(
        _key(words.kinds, found["kind"]), _key(words.colours, found["colour"]), _key(words.sizes, found["size"]), _key(words.spots, found["spot"])
    )
