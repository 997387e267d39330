"""The pack's own graphs, filled in with a wish of the demo."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..train.demo_wishes import DemoWish, Way
from .demo_client import Graph
from .errors import LaunchError
from .paths import PACK_ROOT

GRAPHS = PACK_ROOT / "workflows" / "api"
TASKS: dict[Way, str] = {"size given": "off", "size chosen": "auto ratio", "think + recaption": "think + recaption"}
OWN_SAMPLING = ("t2i_generate", "multi_image")
"""Graphs of the Generate node, which need nothing of the host's samplers."""


def graph_name(wish: DemoWish, *, stock_sampling: bool) -> str:
    """The wish's own graph, or where the host cannot sample flow models the one with Generate that does the same."""
    if stock_sampling or wish.graph in OWN_SAMPLING:
        return wish.graph
    return "multi_image" if wish.sources else "t2i_generate"


def demo_graph(name: str, wish: DemoWish, *, checkpoint: str, guidance: float, seed: int, pictures: Sequence[str]) -> Graph:
    """`checkpoint`: name of the loader's folder. `guidance`: of KSampler where it guides. `pictures`: names in rank 0's input folder, one for each source.

    Raises LaunchError when the graph has too few nodes for the pictures.
    """
    graph: Graph = json.loads((GRAPHS / f"{name}.api.json").read_text(encoding="utf-8"))
    stage = {"task": TASKS[wish.way], "size": _size(name, wish), "seed": seed}
    if wish.size is not None:
        stage |= {"height": wish.size[0], "width": wish.size[1]}
    for node in graph.values():
        kind, inputs = node["class_type"], node["inputs"]
        if kind == "HunyuanImage3Loader":
            inputs["folder"] = checkpoint
        elif kind == "PrimitiveStringMultiline":
            inputs["value"] = wish.prompt
        elif kind in ("HunyuanImage3Generate", "HunyuanImage3Rewrite"):
            inputs |= stage if isinstance(inputs["prompt"], list) else {**stage, "prompt": wish.prompt}
        elif kind == "KSampler":
            inputs |= {"seed": seed, "cfg": inputs["cfg"] if inputs["cfg"] == 1 else guidance}
    return _with_pictures(graph, pictures)


def _size(name: str, wish: DemoWish) -> str:
    if wish.size is not None:
        return "width x height"
    return "follow image 1" if name == "ti2i_edit" else "auto"


def _with_pictures(graph: Graph, pictures: Sequence[str]) -> Graph:
    """The pictures in the graph's Load Image nodes in order; nodes that are left over go, and what was connected to them."""
    loaders = [key for key, node in graph.items() if node["class_type"] == "LoadImage"]
    if len(loaders) < len(pictures):
        raise LaunchError(f"The demo has {len(pictures)} pictures for a graph with {len(loaders)} Load Image nodes; choose another graph.")
    for key, picture in zip(loaders, pictures, strict=False):
        graph[key]["inputs"]["image"] = picture
    for key in loaders[len(pictures) :]:
        del graph[key]
        for node in graph.values():
            node["inputs"] = {name: value for name, value in node["inputs"].items() if not (isinstance(value, list) and value[0] == key)}
    return graph
