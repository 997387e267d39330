"""What the mini model learns from: a wish, the texts that answer it, and the pictures. Pure; drawing and encoding happen elsewhere.

Imports the standard library and its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

from .captions import caption, recaption, think_text
from .edits import instruction, random_edit, think_about
from .mini_tokenizer import SYSTEM_PROMPTS
from .scenes import Scene, random_scene
from .words import LanguageName

Writing = Literal["nothing", "recaption", "think_recaption"]
WRITINGS: tuple[Writing, ...] = ("nothing", "recaption", "think_recaption")
SYSTEM_PROMPT_SHARE = 0.2


@dataclass(frozen=True)
class Picture:
    """A scene and the seed that jitters its objects."""

    scene: Scene
    seed: int


@dataclass(frozen=True)
class Example:
    """One row of training. ``cot_text``: what the assistant writes before the picture, with its tags, or None."""

    prompt: str
    system_prompt: str | None
    cot_text: str | None
    sources: tuple[Picture, ...]
    result: Picture


def draw_example(seed: int, *, pictures: int, writing: Writing) -> Example:
    """The example of a seed with 0, 1 or 2 source pictures, all of whose objects are for training."""
    rng = Random(f"example/{pictures}/{writing}/{seed}")
    language: LanguageName = rng.choice(("english", "chinese"))
    if pictures == 0:
        scene = random_scene(rng.getrandbits(48), unseen=False)
        prompt, thought, sources = caption(scene, language, rng), think_text(scene, language), ()
        result = Picture(scene, rng.getrandbits(32))
    else:
        edit = random_edit(rng.getrandbits(48), unseen=False, pictures=pictures)
        sources = tuple(Picture(scene, rng.getrandbits(32)) for scene in edit.sources)
        prompt, thought = instruction(edit, language, rng), think_about(edit, language)
        # What an edit leaves alone stays where it is to the pixel.
        result = Picture(edit.result, sources[0].seed)
    system_prompt = rng.choice(tuple(SYSTEM_PROMPTS.values())) if rng.random() < SYSTEM_PROMPT_SHARE else None
    return Example(prompt, system_prompt, written(thought, recaption(result.scene, language), writing), sources, result)


def written(thought: str, description: str, writing: Writing) -> str | None:
    """The assistant's text with its tags."""
    if writing == "nothing":
        return None
    opening = f"<think>{thought}</think>" if writing == "think_recaption" else ""
    return f"{opening}<recaption>{description}</recaption>"
