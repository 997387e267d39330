"""The workflows against the nodes: every file opens, both formats agree, no input is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ui_format import AFTER_RUN, ANY_TYPE, SEEDS, NodeShape, shape_of_class, shape_of_record, to_api

from phase_parallel.nodes.registry import NODES

ROOT = Path(__file__).resolve().parents[2]
FILES = {path.stem: path for path in (ROOT / "workflows").glob("*.json")}
STEMS = sorted(FILES)


@pytest.fixture(scope="module")
def shapes() -> dict[str, NodeShape]:
    stock = json.loads((Path(__file__).parent / "stock_nodes.json").read_text())
    recorded = {name: shape_of_record(record) for name, record in stock.items()}
    return recorded | {name: shape_of_class(node) for name, (node, _) in NODES.items()}


def read_ui(stem: str) -> dict[str, Any]:
    return json.loads(FILES[stem].read_text())


def read_api(stem: str) -> dict[str, dict[str, Any]]:
    return json.loads((FILES[stem].parent / "api" / f"{stem}.api.json").read_text())


def test_every_file_has_its_twin() -> None:
    twins = [path.name.removesuffix(".api.json") for path in (ROOT / "workflows" / "api").iterdir()]
    assert sorted(twins) == STEMS != []


@pytest.mark.parametrize("stem", STEMS)
def test_ui_format_converts_to_the_api_format(stem: str, shapes: dict[str, NodeShape]) -> None:
    written = read_api(stem)
    titles = {key: node.pop("_meta")["title"] for key, node in written.items()}
    assert all(titles.values())
    assert to_api(read_ui(stem), shapes) == written


@pytest.mark.parametrize("stem", STEMS)
def test_api_graph_fits_the_nodes(stem: str, shapes: dict[str, NodeShape]) -> None:
    graph = read_api(stem)
    for key, node in graph.items():
        shape = shapes[node["class_type"]]
        assert set(node["inputs"]) <= shape.names, f"{stem}: node {key} has inputs that do not exist"
        for name, value in node["inputs"].items():
            if isinstance(value, list):
                source, slot = value
                given = shapes[graph[source]["class_type"]].outputs[slot]
                wanted = shape.sockets.get(name) or shape.widgets[name]
                assert wanted in (given, ANY_TYPE), f"{stem}: {name} of node {key}"


@pytest.mark.parametrize("stem", STEMS)
def test_widget_values_are_allowed(stem: str) -> None:
    """Own nodes: nothing required is missing, choices exist, numbers are in range."""
    for node in read_api(stem).values():
        if node["class_type"] not in NODES:
            continue
        types = NODES[node["class_type"]][0].INPUT_TYPES()
        assert set(types["required"]) <= set(node["inputs"])
        for name, (kind, options) in {**types["required"], **types.get("optional", {})}.items():
            value = node["inputs"].get(name)
            if value is None or isinstance(value, list) or name == "folder":
                continue
            if isinstance(kind, list):
                assert value in kind, f"{node['class_type']}.{name}"
            elif kind in ("INT", "FLOAT"):
                assert options["min"] <= value <= options["max"], f"{node['class_type']}.{name}"


@pytest.mark.parametrize("stem", STEMS)
def test_editor_can_open_the_file(stem: str, shapes: dict[str, NodeShape]) -> None:
    ui = read_ui(stem)
    nodes = {node["id"]: node for node in ui["nodes"]}
    assert ui["last_node_id"] == max(nodes)
    assert ui["last_link_id"] == max(link[0] for link in ui["links"])
    for number, source, slot, target, place, kind in ui["links"]:
        assert number in nodes[source]["outputs"][slot]["links"]
        assert nodes[source]["outputs"][slot]["type"] == kind
        assert nodes[target]["inputs"][place]["link"] == number
    for node in ui["nodes"]:
        if node["type"] == "Note":
            assert len(node["widgets_values"][0]) > 100, "the note should explain the workflow"
            continue
        sockets = [entry["name"] for entry in node["inputs"] if "widget" not in entry]
        assert sockets == list(shapes[node["type"]].sockets)
        for entry in node["inputs"]:
            assert entry.get("widget", {"name": entry["name"]}) == {"name": entry["name"]}
    assert sum(node["type"] == "Note" for node in ui["nodes"]) == 1


@pytest.mark.parametrize("stem", STEMS)
def test_nodes_do_not_cover_each_other(stem: str) -> None:
    boxes = [(*node["pos"], *node["size"]) for node in read_ui(stem)["nodes"]]
    title_bar = 30
    for index, (x, y, width, height) in enumerate(boxes):
        for other_x, other_y, other_width, other_height in boxes[index + 1 :]:
            apart = (
                x + width <= other_x
                or other_x + other_width <= x
                or y + height <= other_y - title_bar
                or other_y + other_height <= y - title_bar
            )
            assert apart, f"{stem}: boxes at {x, y} and {other_x, other_y}"


@pytest.mark.parametrize("stem", STEMS)
def test_saved_graphs_reproduce(stem: str) -> None:
    text = FILES[stem].read_text()
    assert not any(f'"{word}"' in text for word in AFTER_RUN if word != "fixed")
    for node in read_api(stem).values():
        for name in SEEDS:
            assert isinstance(node["inputs"].get(name, 0), int)
        assert not any(str(value).startswith("/") for value in node["inputs"].values())
