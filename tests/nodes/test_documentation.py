"""Every node and every input explains itself: tooltips, help pages, both locales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phase_parallel.nodes.registry import NODES

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = ("en", "zh")


def inputs_of(node: type) -> dict[str, Any]:
    types = node.INPUT_TYPES()
    return {**types.get("required", {}), **types.get("optional", {})}


def outputs_of(node: type) -> tuple[str, ...]:
    return getattr(node, "RETURN_NAMES", node.RETURN_TYPES)


@pytest.mark.parametrize("name", NODES)
def test_node_and_all_inputs_have_words(name: str) -> None:
    node, title = NODES[name]
    assert "HunyuanImage-3.0" in title
    assert node.DESCRIPTION.endswith(".")
    assert node.CATEGORY == "HunyuanImage3"
    assert len(node.OUTPUT_TOOLTIPS) == len(node.RETURN_TYPES) == len(outputs_of(node))
    for key, (_, options) in inputs_of(node).items():
        assert len(options["tooltip"]) > 15, f"{name}.{key} has no tooltip"


@pytest.mark.parametrize("name", NODES)
def test_defaults_of_widgets_and_methods_agree(name: str) -> None:
    node, _ = NODES[name]
    method = getattr(node, node.FUNCTION)
    arguments = method.__code__.co_varnames[: method.__code__.co_argcount]
    defaults = dict(zip(reversed(arguments), reversed(method.__defaults__ or ()), strict=False))
    types = node.INPUT_TYPES()
    hidden = set(types.get("hidden", {}))
    assert set(arguments[1:]) == set(inputs_of(node)) | hidden
    for key, (_, options) in types.get("optional", {}).items():
        if "default" in options:
            assert defaults[key] == options["default"], f"{name}.{key}"
        else:
            assert not defaults[key], f"{name}.{key}"


@pytest.mark.parametrize("name", NODES)
def test_help_pages(name: str) -> None:
    english = (ROOT / "web" / "docs" / f"{name}.md").read_text()
    chinese = (ROOT / "web" / "docs" / name / "zh.md").read_text()
    assert english.startswith("# ") and chinese.startswith("# ")
    assert any("\u4e00" <= letter <= "\u9fff" for letter in chinese)


def test_no_page_without_a_node() -> None:
    docs = ROOT / "web" / "docs"
    assert {page.stem for page in docs.glob("*.md")} == set(NODES)
    assert {page.parent.name for page in docs.glob("*/*.md")} == set(NODES)


@pytest.mark.parametrize("language", LANGUAGES)
def test_locale_covers_everything(language: str) -> None:
    definitions = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text())
    assert set(definitions) == set(NODES)
    for name, (node, _) in NODES.items():
        entry = definitions[name]
        assert entry["display_name"] and entry["description"]
        assert list(entry["inputs"]) == list(inputs_of(node)), name
        assert list(entry["outputs"]) == [str(index) for index in range(len(outputs_of(node)))], name
        for words in (*entry["inputs"].values(), *entry["outputs"].values()):
            assert words["name"] and words["tooltip"]
    categories = json.loads((ROOT / "locales" / language / "main.json").read_text())["nodeCategories"]
    assert set(categories) == {"HunyuanImage3"}


def test_english_locale_says_what_the_nodes_say() -> None:
    definitions = json.loads((ROOT / "locales" / "en" / "nodeDefs.json").read_text())
    for name, (node, title) in NODES.items():
        entry = definitions[name]
        assert (entry["display_name"], entry["description"]) == (title, node.DESCRIPTION)
        for key, (_, options) in inputs_of(node).items():
            assert entry["inputs"][key] == {"name": key, "tooltip": options["tooltip"]}, f"{name}.{key}"
        for index, (output, tooltip) in enumerate(zip(outputs_of(node), node.OUTPUT_TOOLTIPS, strict=True)):
            assert entry["outputs"][str(index)] == {"name": output, "tooltip": tooltip}
