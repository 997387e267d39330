"""The words of both languages and the sentences made of them, as tables: whoever reads these knows every token that the texts can hold.

In a sentence, {x} is a slot; a slot with a capital begins a sentence. Imports the standard library and the names of scenes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .scenes import POSITIONS

LanguageName = Literal["english", "chinese"]
Table = dict[str, str]


@dataclass(frozen=True)
class Language:
    """Words by the names of train/scenes.py, and sentences with slots."""

    kinds: Table
    colours: Table
    sizes: Table
    aspects: Table
    spots: Table
    """A position as part of an object's name: "at the left", "左侧"."""
    targets: Table
    """A position as the end of a move: "to the left", "左侧"."""
    counts: tuple[str, str, str]
    nouns: tuple[str, str, str]
    """What is counted, after each of the counts."""
    ordinals: tuple[str, str, str]
    articles: tuple[str, ...]
    """Words before an object's name; the second one before a vowel."""
    space: str
    """Between the words of an object's name."""
    placed: str
    """An object with its spot."""
    alone: str
    """An object without."""
    last: str
    """Before the last object of a list."""
    comma: str
    """Before the others."""
    format: str
    on: str
    tail: str
    make: str
    captions: tuple[str, ...]
    """{format}, {on}, {tail} and {make} hold the fields above where there is something to say, else nothing."""
    think_opening: str
    think_object: str
    think_closing: str
    recaption_opening: str
    between: str
    """Between the objects of a recaption."""
    stop: str
    edits: dict[str, tuple[str, str]]
    """Two phrasings of each kind of edit."""
    shows: str
    """What the thought about an edit begins with, for each picture."""
    becomes: str
    appears: str
    goes: str
    backdrop: str
    rest: str


ENGLISH = Language(
    kinds={name: name for name in ("circle", "square", "triangle", "star", "ring", "cross")},
    colours={name: name for name in ("red", "orange", "yellow", "green", "blue", "purple", "black", "white", "grey", "pink", "cyan")},
    sizes={name: name for name in ("small", "medium", "large")},
    aspects={name: name for name in ("square", "wide", "tall")},
    spots={name: "in the centre" if name == "centre" else f"at the {name}" for name in POSITIONS},
    targets={name: f"to the {name}" for name in POSITIONS},
    counts=("one", "two", "three"),
    nouns=("shape", "shapes", "shapes"),
    ordinals=("first", "second", "third"),
    articles=("a", "an"),
    space=" ",
    placed="{article} {thing} {spot}",
    alone="{article} {thing}",
    last=" and ",
    comma=", ",
    format="{aspect} ",
    on=" on a {background} background",
    tail=", {aspect} format",
    make=" Make the picture {aspect}.",
    captions=(
        "A {format}picture of {objects}{on}.",
        "{Objects}{on}{tail}.",
        "Draw {objects}{on}.{make}",
        "{Count} {noun}{on}: {objects}.{make}",
        "Please make a {format}picture of {objects}{on}.",
    ),
    think_opening="The user wants {count} {noun}.",
    think_object=" The {ordinal} is {object}.",
    think_closing=" The background is {background} and the picture is {aspect}.",
    recaption_opening="A {aspect} picture with a {background} background. {Count} {noun}: ",
    between="; ",
    stop=".",
    edits={
        "recolour": ("Make the {target} {colour}.", "Change the colour of the {target} to {colour}."),
        "resize": ("Make the {target} {size}.", "Change the size of the {target} to {size}."),
        "move": ("Move the {target} {to}.", "Put the {target} {at}."),
        "reshape": ("Turn the {target} into a {kind}.", "Change the shape of the {target} to a {kind}."),
        "add": ("Add {new} {at}.", "Put {new} {at}."),
        "remove": ("Remove the {target}.", "Delete the {target}."),
        "repaint": ("Make the background {background}.", "Change the background to {background}."),
        "shape_and_colour": ("The shape of image 1 with the colour of image 2.", "Give the shape of image 1 the colour of image 2."),
        "colour_and_shape": ("The object of image 1 with the shape of image 2.", "Give the object of image 1 the shape of image 2."),
        "bring": ("Add the {target} of image 2 to image 1.", "Put the {target} of image 2 into image 1."),
        "backdrop": ("Image 1 with the background of image 2.", "Give image 1 the background of image 2."),
    },
    shows="Image {number} shows {objects}. ",
    becomes="The {target} becomes {object}. ",
    appears="New is {object}. ",
    goes="The {target} goes. ",
    backdrop="The background becomes {background}. ",
    rest="Everything else stays.",
)

CHINESE = Language(
    kinds={"circle": "圆形", "square": "正方形", "triangle": "三角形", "star": "五角星", "ring": "圆环", "cross": "十字"},
    colours={
        "red": "红色",
        "orange": "橙色",
        "yellow": "黄色",
        "green": "绿色",
        "blue": "蓝色",
        "purple": "紫色",
        "black": "黑色",
        "white": "白色",
        "grey": "灰色",
        "pink": "粉色",
        "cyan": "青色",
    },
    sizes={"small": "小号", "medium": "中号", "large": "大号"},
    aspects={"square": "方幅", "wide": "宽幅", "tall": "竖幅"},
    spots=dict(zip(POSITIONS, ("左上角", "上方", "右上角", "左侧", "中央", "右侧", "左下角", "下方", "右下角"), strict=True)),
    targets=dict(zip(POSITIONS, ("左上角", "上方", "右上角", "左侧", "中央", "右侧", "左下角", "下方", "右下角"), strict=True)),
    counts=("一", "两", "三"),
    nouns=("图形", "图形", "图形"),
    ordinals=("第一个", "第二个", "第三个"),
    articles=("一个",),
    space="",
    placed="{spot}的{thing}",
    alone="{article}{thing}",
    last="和",
    comma="、",
    format="{aspect}",
    on="，{background}背景",
    tail="，画面为{aspect}",
    make="画面为{aspect}。",
    captions=(
        "一幅{format}图画{on}，画着{objects}。",
        "{Objects}{on}{tail}。",
        "画{objects}{on}。{make}",
        "{Count}个{noun}{on}：{objects}。{make}",
        "请给我一张{format}图片{on}，上面有{objects}。",
    ),
    think_opening="用户想要{count}个{noun}。",
    think_object="{ordinal}是{object}。",
    think_closing="背景是{background}，画面是{aspect}。",
    recaption_opening="{aspect}画面，{background}背景。{Count}个{noun}：",
    between="；",
    stop="。",
    edits={
        "recolour": ("把{target}变成{colour}。", "将{target}的颜色改为{colour}。"),
        "resize": ("把{target}变成{size}。", "将{target}的大小改为{size}。"),
        "move": ("把{target}移到{to}。", "将{target}放在{at}。"),
        "reshape": ("把{target}变成{kind}。", "将{target}的形状改为{kind}。"),
        "add": ("在{at}添加{new}。", "在{at}放{new}。"),
        "remove": ("去掉{target}。", "删除{target}。"),
        "repaint": ("把背景变成{background}。", "将背景改为{background}。"),
        "shape_and_colour": ("图1的形状，图2的颜色。", "给图1的形状换上图2的颜色。"),
        "colour_and_shape": ("图1的图形，图2的形状。", "把图1的图形换成图2的形状。"),
        "bring": ("把图2的{target}添加到图1。", "将图2的{target}放到图1里。"),
        "backdrop": ("图1，换上图2的背景。", "给图1换上图2的背景。"),
    },
    shows="图{number}有{objects}。",
    becomes="{target}变成{object}。",
    appears="新增{object}。",
    goes="{target}消失。",
    backdrop="背景变成{background}。",
    rest="其他不变。",
)

LANGUAGES: dict[LanguageName, Language] = {"english": ENGLISH, "chinese": CHINESE}
