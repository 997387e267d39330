"""From the editor's file format to the one that `POST /prompt` takes.

The editor stores a node's widgets by position, in the order of its inputs, with one value more after each
seed (what happens to it after a run) and after each file widget (its upload button). Linked widgets keep
their place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Graph = dict[str, dict[str, Any]]

WIDGET_TYPES = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
SEEDS = ("seed", "noise_seed")
AFTER_RUN = ("fixed", "increment", "decrement", "randomize")
ANY_TYPE = "*"
NOT_EXECUTED = ("Note", "MarkdownNote")


@dataclass(frozen=True)
class NodeShape:
    """`widgets` and `sockets`: input name -> type, in the order of the node's definition."""

    widgets: dict[str, str]
    sockets: dict[str, str]
    outputs: tuple[str, ...]

    @property
    def names(self) -> set[str]:
        return {*self.widgets, *self.sockets}


def shape_of_class(node: type) -> NodeShape:
    """Shape of a node whose class we have."""
    types = node.INPUT_TYPES()
    widgets: dict[str, str] = {}
    sockets: dict[str, str] = {}
    for group in ("required", "optional"):
        for name, (kind, options) in types.get(group, {}).items():
            kind = "COMBO" if isinstance(kind, list) else kind
            is_widget = kind in WIDGET_TYPES and not options.get("forceInput")
            (widgets if is_widget else sockets)[name] = kind
    return NodeShape(widgets, sockets, tuple(node.RETURN_TYPES))


def shape_of_record(record: dict[str, Any]) -> NodeShape:
    """Shape of a stock node, from stock_nodes.json."""
    inputs = record["inputs"]
    widgets = {name: kind for name, kind in inputs.items() if kind in WIDGET_TYPES}
    sockets = {name: kind for name, kind in inputs.items() if kind not in WIDGET_TYPES}
    return NodeShape(widgets, sockets, tuple(record["outputs"]))


def to_api(ui: dict[str, Any], shapes: dict[str, NodeShape]) -> Graph:
    """The graph in API format, without titles. Raises AssertionError where the file contradicts the nodes."""
    links = {link[0]: link for link in ui["links"]}
    graph: Graph = {}
    for node in sorted(ui["nodes"], key=lambda node: node["id"]):
        if node["type"] in NOT_EXECUTED or node.get("mode", 0) in (2, 4):
            continue
        shape = shapes[node["type"]]
        inputs = widget_values(node, shape)
        for entry in node["inputs"]:
            if entry["link"] is None:
                continue
            _, source, slot, target, _, kind = links[entry["link"]]
            assert target == node["id"], f"link {entry['link']} does not end at node {node['id']}"
            declared = shape.sockets.get(entry["name"]) or shape.widgets.get(entry["name"])
            assert declared in (kind, ANY_TYPE), f"{node['type']}.{entry['name']} is {declared}, its link is {kind}"
            inputs[entry["name"]] = [str(source), slot]
        graph[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return graph


def widget_values(node: dict[str, Any], shape: NodeShape) -> dict[str, Any]:
    """Values of the widgets that are not linked, by name."""
    values = list(node["widgets_values"])
    linked = {entry["name"] for entry in node["inputs"] if entry["link"] is not None}
    found: dict[str, Any] = {}
    for name, kind in shape.widgets.items():
        value = values.pop(0)
        _check_kind(f"{node['type']}.{name}", kind, value)
        if name not in linked:
            found[name] = value
        if name in SEEDS:
            assert values.pop(0) in AFTER_RUN, f"{node['type']}.{name} has no value for after the run"
        if (node["type"], name) == ("LoadImage", "image"):
            assert values.pop(0) == "image", "the upload button's value is missing"
    assert not values, f"{node['type']} has {len(values)} widget values too many: {values}"
    return found


def _check_kind(where: str, kind: str, value: Any) -> None:
    kinds = {"INT": int, "FLOAT": (int, float), "STRING": str, "BOOLEAN": bool, "COMBO": str}
    assert isinstance(value, kinds[kind]), f"{where} is {kind}, the file says {value!r}"
