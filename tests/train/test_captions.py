"""Texts about scenes: both languages say the same, recaptions can be read back, and the vocabulary holds every word."""

from __future__ import annotations

from random import Random

import pytest

from phase_parallel.train.captions import CaptionError, caption, parse_recaption, recaption, think_text
from phase_parallel.train.edits import instruction, random_edit, think_about
from phase_parallel.train.scenes import SceneObject, make_scene, random_scene
from phase_parallel.train.vocabulary import pieces, vocabulary
from phase_parallel.train.words import LANGUAGES, Language, LanguageName

BOTH: tuple[LanguageName, ...] = ("english", "chinese")
SCENE = make_scene([SceneObject("circle", "red", "medium", "centre"), SceneObject("star", "orange", "small", "top left")], "white", "wide")


def mentions(text: str, table: dict[str, str]) -> list[str]:
    """Names of a table in the order in which their words stand in a text; the longest word wins."""
    text, found = text.lower(), []
    while text:
        name = next((name for name in sorted(table, key=lambda name: -len(table[name])) if text.startswith(table[name].lower())), None)
        found += [name] if name else []
        text = text[len(table[name]) if name else 1 :]
    return found


def things(text: str, words: Language) -> list[tuple[str, str]]:
    """(colour, kind) of each object in the order of the text."""
    table = {(colour, kind): words.space.join((words.colours[colour], words.kinds[kind])) for colour in words.colours for kind in words.kinds}
    return mentions(text, table)


@pytest.mark.parametrize("language", BOTH)
def test_recaptions_can_be_read_back(language: LanguageName) -> None:
    for seed in range(300):
        scene = random_scene(seed, unseen=seed % 2 == 0)
        assert parse_recaption(recaption(scene, language)) == scene


def test_a_decoder_may_change_the_spaces() -> None:
    assert parse_recaption("  " + recaption(SCENE, "english").replace(" ", "  ")) == SCENE
    assert parse_recaption(" ".join(recaption(SCENE, "chinese"))) == SCENE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a red circle", "form of a recaption"),
        ("A wide picture with a white background. Two shapes: a small red circle at the top.", "says Two but describes 1"),
        ("A wide picture with a white background. One shape: a small circle at the top.", "one object"),
        ("A wide picture with a red background. One shape: a small red circle at the top.", "cannot be drawn"),
        ("宽幅画面，白色背景。一个图形：上方的红色圆形。", "one object"),
    ],
)
def test_other_texts_are_no_recaptions(text: str, message: str) -> None:
    with pytest.raises(CaptionError, match=message):
        parse_recaption(text)


@pytest.mark.parametrize("language", BOTH)
def test_captions_name_what_is_not_usual(language: LanguageName) -> None:
    words = LANGUAGES[language]
    for seed in range(300):
        scene = random_scene(seed, unseen=False)
        text = caption(scene, language, Random(seed))
        assert things(text, words) == [(thing.colour, thing.kind) for thing in scene.objects]
        assert all(words.spots[thing.position] in text for thing in scene.objects if thing.position != "centre"), text
        assert all(words.sizes[thing.size] in text.lower() for thing in scene.objects if thing.size != "medium"), text
        assert scene.aspect == "square" or words.aspects[scene.aspect] in text
        assert scene.background == "white" or words.colours[scene.background] in text


@pytest.mark.parametrize("language", BOTH)
def test_thoughts_name_every_attribute(language: LanguageName) -> None:
    words = LANGUAGES[language]
    for seed in range(50):
        scene = random_scene(seed, unseen=False)
        text = think_text(scene, language)
        assert mentions(text, words.spots) == [thing.position for thing in scene.objects]
        assert mentions(text, words.colours) == [*[thing.colour for thing in scene.objects], scene.background]
        assert words.aspects[scene.aspect] in text


@pytest.mark.parametrize("language", BOTH)
def test_a_seed_gives_one_caption_and_seeds_give_many(language: LanguageName) -> None:
    texts = [caption(SCENE, language, Random(seed)) for seed in range(200)]
    assert texts == [caption(SCENE, language, Random(seed)) for seed in range(200)]
    assert len(set(texts)) >= 20


def test_texts_read_as_people_write_them() -> None:
    drawn = {caption(SCENE, language, Random(seed)) for language in BOTH for seed in range(200)}
    assert "A wide picture of a small orange star at the top left and a red circle." in drawn
    alone = make_scene([SceneObject("star", "orange", "medium", "centre")], "white", "square")
    assert "Draw an orange star." in {caption(alone, "english", Random(seed)) for seed in range(100)}
    assert "一幅宽幅图画，画着左上角的小号橙色五角星和一个红色圆形。" in drawn
    assert recaption(SCENE, "english") == (
        "A wide picture with a white background. Two shapes: a small orange star at the top left; a medium red circle in the centre."
    )
    assert recaption(SCENE, "chinese") == "宽幅画面，白色背景。两个图形：左上角的小号橙色五角星；中央的中号红色圆形。"


def test_the_vocabulary_is_complete_and_small() -> None:
    known, used = set(vocabulary()), set()
    for seed in range(600):
        rng, scene = Random(seed), random_scene(seed, unseen=False)
        edit = random_edit(seed, unseen=False, pictures=1 + seed % 2)
        for language in BOTH:
            texts = (caption(scene, language, rng), think_text(scene, language), recaption(scene, language), instruction(edit, language, rng))
            used.update(piece for text in (*texts, think_about(edit, language)) for piece in pieces(text))
    assert not used - known
    assert len(known) < 230
    assert list(vocabulary()) == sorted(known)


def test_pieces_lose_only_spaces() -> None:
    text = "Image 12: 一幅 red-ish picture."
    assert pieces(text) == ["Image", "1", "2", ":", "一", "幅", "red", "-", "ish", "picture", "."]
    assert "".join(pieces(text)) == text.replace(" ", "")
