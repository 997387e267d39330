"""The eight pictures of `phase-parallel demo`: every way of asking that the mini checkpoints know, over scenes that they were not trained on.

Imports its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .mini import Kind
from .scenes import Scene, SceneObject, make_scene, size_of
from .words import LanguageName

Way = Literal["size given", "size chosen", "think + recaption"]


@dataclass(frozen=True)
class DemoWish:
    """`graph`: name in workflows/api. `title`: the way in words. `translation`: of a Chinese prompt into English. `sources`: what is given, a scene to be
    drawn by rule or the number (from 1) of an earlier wish whose picture is taken. `wanted`: what should come out."""

    graph: str
    title: str
    way: Way
    language: LanguageName
    prompt: str
    wanted: Scene
    translation: str = ""
    sources: tuple[Scene | int, ...] = ()
    kind: Kind = "instruct"

    @property
    def meaning(self) -> str:
        """The prompt in English."""
        return self.translation or self.prompt

    @property
    def size(self) -> tuple[int, int] | None:
        """(height, width) where it is given."""
        return size_of(self.wanted.aspect) if self.way == "size given" else None


def _scene(background: str, aspect: str, *objects: str) -> Scene:
    """Objects as "size colour kind place"."""
    things = (text.split(" ", 3) for text in objects)
    return make_scene([SceneObject(kind, colour, size, place) for size, colour, kind, place in things], background, aspect)


_FIRST = _scene("cyan", "square", "small yellow star left", "large red circle centre", "small black star right")

DEMO_WISHES = (
    DemoWish(
        graph="t2i_generate",
        title="text to image",
        way="size given",
        language="english",
        prompt="Draw a small yellow star at the left, a large red circle in the centre and a small black star at the right on a cyan background.",
        wanted=_FIRST,
    ),
    DemoWish(
        graph="t2i_generate",
        title="text to image",
        way="size given",
        language="chinese",
        prompt="画左上角的紫色圆形、左下角的黄色三角形和右下角的大号蓝色五角星，粉色背景。",
        translation="A purple circle at the top left, a yellow triangle at the bottom left and a large blue star at the bottom right on a pink background.",
        wanted=_scene("pink", "square", "medium purple circle top left", "medium yellow triangle bottom left", "large blue star bottom right"),
    ),
    DemoWish(
        graph="t2i_ksampler",
        title="proportions by the model",
        way="size chosen",
        language="english",
        prompt="A wide picture of a large orange triangle at the left and a green square at the right on a black background.",
        wanted=_scene("black", "wide", "large orange triangle left", "medium green square right"),
    ),
    DemoWish(
        graph="t2i_ksampler",
        title="proportions by the model",
        way="size chosen",
        language="chinese",
        prompt="一幅竖幅图画，灰色背景，画着上方的大号白色圆环和下方的大号红色十字。",
        translation="A tall picture of a large white ring at the top and a large red cross at the bottom on a grey background.",
        wanted=_scene("grey", "tall", "large white ring top", "large red cross bottom"),
    ),
    DemoWish(
        graph="t2i_think_recaption",
        title="think + recaption",
        way="think + recaption",
        language="english",
        prompt="Three shapes on a grey background: a small yellow ring at the top left, a blue cross and a small red ring at the bottom right.",
        wanted=_scene("grey", "square", "small yellow ring top left", "medium blue cross centre", "small red ring bottom right"),
    ),
    DemoWish(
        graph="ti2i_edit",
        title="edit of picture 1",
        way="think + recaption",
        language="chinese",
        prompt="把圆形变成紫色。",
        translation="Make the circle purple.",
        wanted=_scene("cyan", "square", "small yellow star left", "large purple circle centre", "small black star right"),
        sources=(1,),
    ),
    DemoWish(
        graph="multi_image",
        title="of two pictures",
        way="think + recaption",
        language="english",
        prompt="The shape of image 1 with the colour of image 2.",
        wanted=_scene("grey", "square", "large blue star left"),
        sources=(_scene("grey", "square", "large white star left"), _scene("white", "square", "medium blue cross right")),
    ),
    DemoWish(
        graph="distil_8_steps",
        title="Distil, 8 steps",
        way="size chosen",
        language="english",
        prompt="A picture of a red cross at the top right, a large white star at the left and a small green ring at the bottom on a black background.",
        wanted=_scene("black", "square", "medium red cross top right", "large white star left", "small green ring bottom"),
        kind="distil",
    ),
)
