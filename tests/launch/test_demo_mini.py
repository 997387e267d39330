"""The demo with the mini checkpoints, without ranks: its wishes, its graphs, and what it shows. The whole of it runs in test_real_host.py."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from PIL import Image

from phase_parallel.launch import demo_mini as module
from phase_parallel.launch.cli import main
from phase_parallel.launch.demo_graphs import GRAPHS, OWN_SAMPLING, demo_graph, graph_name
from phase_parallel.launch.demo_mini import mini_demo, png
from phase_parallel.launch.demo_report import SHEET
from phase_parallel.launch.errors import LaunchError
from phase_parallel.train.captions import caption
from phase_parallel.train.demo_wishes import DEMO_WISHES, DemoWish
from phase_parallel.train.drawing import render
from phase_parallel.train.edits import change, instruction, shape_and_colour
from phase_parallel.train.mini import NAMES
from phase_parallel.train.scenes import Scene, is_unseen, size_of

FIRST = DEMO_WISHES[0]


def made_from(wish: DemoWish) -> list[Scene]:
    return [source if isinstance(source, Scene) else DEMO_WISHES[source - 1].wanted for source in wish.sources]


def test_every_way_of_the_pack_is_shown() -> None:
    assert len(DEMO_WISHES) == 8
    assert {wish.graph for wish in DEMO_WISHES} == {
        "t2i_generate", "t2i_ksampler", "t2i_think_recaption", "ti2i_edit", "multi_image", "distil_8_steps",
    }  # fmt: skip
    assert {wish.wanted.aspect for wish in DEMO_WISHES if wish.way == "size chosen"} == {"square", "wide", "tall"}
    assert {wish.language for wish in DEMO_WISHES} == {"english", "chinese"}
    assert [wish.kind for wish in DEMO_WISHES].count("distil") == 1


def test_nothing_wanted_was_trained_on() -> None:
    assert all(is_unseen(thing) for wish in DEMO_WISHES for thing in wish.wanted.objects)


@pytest.mark.parametrize("number", range(8))
def test_prompts_are_said_as_people_say_them(number: int) -> None:
    """Each is one of the phrasings of its scene or edit, in its language, and so is the English one."""
    wish = DEMO_WISHES[number]
    if wish.graph == "ti2i_edit":
        (source,) = made_from(wish)
        edit = change("recolour", source, next(thing for thing in source.objects if thing.kind == "circle"), "purple")
    elif wish.graph == "multi_image":
        edit = shape_and_colour(*made_from(wish))
    else:
        edit = None
    for text, language in ((wish.prompt, wish.language), (wish.meaning, "english")):
        said = {caption(wish.wanted, language, Random(seed)) if edit is None else instruction(edit, language, Random(seed)) for seed in range(400)}
        assert text in said
    assert edit is None or edit.result == wish.wanted


@pytest.mark.parametrize("stock", [True, False])
@pytest.mark.parametrize("number", range(8))
def test_graphs_hold_their_wishes(number: int, stock: bool) -> None:
    wish = DEMO_WISHES[number]
    name = graph_name(wish, stock_sampling=stock)
    assert stock or name in OWN_SAMPLING
    pictures = [f"{place}.png" for place in range(len(wish.sources))]
    graph = demo_graph(name, wish, checkpoint="mini", guidance=2.5, seed=9, pictures=pictures)
    by_class: dict[str, list[dict[str, Any]]] = {}
    for node in graph.values():
        by_class.setdefault(node["class_type"], []).append(node["inputs"])
        assert all(value[0] in graph for value in node["inputs"].values() if isinstance(value, list)), "a connection to nowhere"
    assert by_class["HunyuanImage3Loader"][0]["folder"] == "mini"
    assert [inputs["image"] for inputs in by_class.get("LoadImage", [])] == pictures
    assert wish.prompt in json.dumps(graph, ensure_ascii=False)
    stage = (by_class.get("HunyuanImage3Generate") or by_class["HunyuanImage3Rewrite"])[0]
    assert stage["seed"] == 9 and stage["task"] == {"size given": "off", "size chosen": "auto ratio"}.get(wish.way, "think + recaption")
    if wish.way == "size given":
        assert (stage["size"], stage["height"], stage["width"]) == ("width x height", *size_of(wish.wanted.aspect))
    else:
        assert stage["size"] == ("follow image 1" if name == "ti2i_edit" else "auto")
    for sampler in by_class.get("KSampler", []):
        assert (sampler["seed"], sampler["cfg"]) == (9, 1.0 if wish.kind == "distil" else 2.5)


def test_widgets_of_the_graphs_are_those_that_are_filled_in() -> None:
    """A name that a graph does not have would be sent in vain."""
    for wish in DEMO_WISHES:
        before = json.loads((GRAPHS / f"{wish.graph}.api.json").read_text())
        after = demo_graph(wish.graph, wish, checkpoint="mini", guidance=2.5, seed=9, pictures=["a.png"] * len(wish.sources))
        assert {key: set(node["inputs"]) for key, node in before.items()} == {key: set(node["inputs"]) for key, node in after.items()}


def test_too_many_pictures_are_refused() -> None:
    with pytest.raises(LaunchError, match="3 pictures for a graph with 2 Load Image nodes"):
        demo_graph("multi_image", FIRST, checkpoint="mini", guidance=2.5, seed=1, pictures=["a", "b", "c"])


class FakeRanks:
    """A rank 0 that draws by rule what is wanted, and the launch around it."""

    url = "http://rank0"

    def __init__(self, **options: Any) -> None:
        self.options = options

    def __enter__(self) -> FakeRanks:
        return self

    def __exit__(self, *reasons: object) -> None: ...

    def last_lines(self, count: int) -> str:
        return "what the ranks said"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What was sent to the ranks: graphs, and uploads by name."""
    sent: dict[str, Any] = {"graphs": [], "uploads": {}, "spoil": None}

    async def run_prompt(url: str, graph: Any, progress: Any) -> int:
        sent["graphs"].append(graph)
        progress.seconds["denoise"] = 2.0
        return len(sent["graphs"])

    def saved(url: str, number: int) -> list[bytes]:
        wanted = DEMO_WISHES[number - 1].wanted
        if sent["spoil"] == number:
            wanted = replace(wanted, background="grey")
        return [png(render(wanted, *size_of(wanted.aspect), number))]

    monkeypatch.setattr(module, "Launch", FakeRanks)
    monkeypatch.setattr(module, "MINI_STATE", tmp_path / "state")
    monkeypatch.setattr(module, "run_prompt", run_prompt)
    monkeypatch.setattr(module, "saved_images", saved)
    monkeypatch.setattr(module, "has_stock_sampling", lambda url: True)
    monkeypatch.setattr(module, "upload_image", lambda url, name, content: sent["uploads"].update({name: content}))
    monkeypatch.setattr(module, "get_json", lambda url: {"ranks": [None] * 4})
    monkeypatch.setattr(module, "wait_for_equal_digests", lambda url: ["ab" * 16] * 4)
    return sent


def test_the_demo_shows_and_saves_everything(drawn: dict[str, Any], shipped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mini_demo("cpu", tmp_path / "out", ranks=4, shipped=shipped)
    shown = capsys.readouterr().out
    assert "finds 8 of 8 pictures as wanted in everything, and 100% of what was wanted" in shown
    assert all(wish.prompt in shown for wish in DEMO_WISHES)
    assert shown.count("ab" * 16) == 8, "the digest that all ranks have of each picture"
    assert any(line.split() == ["denoise", "16.00"] for line in shown.splitlines()), "seconds of all pictures together"
    assert len(list((tmp_path / "out").glob("*.png"))) == 9 and (tmp_path / "out" / SHEET).is_file()


def test_an_edit_gets_the_picture_that_was_made_before(drawn: dict[str, Any], shipped: Path, tmp_path: Path) -> None:
    mini_demo("cpu", tmp_path / "out", ranks=4, shipped=shipped)
    given = {name: np.asarray(Image.open(io.BytesIO(content))) for name, content in drawn["uploads"].items()}
    assert list(given) == ["phase_parallel_demo_6_1.png", "phase_parallel_demo_7_1.png", "phase_parallel_demo_7_2.png"]
    assert np.array_equal(given["phase_parallel_demo_6_1.png"], render(FIRST.wanted, *size_of("square"), 1))


def test_a_wrong_picture_is_called_wrong(drawn: dict[str, Any], shipped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn["spoil"] = 8
    mini_demo("cpu", tmp_path / "out", ranks=4, shipped=shipped)
    shown = capsys.readouterr().out
    assert "finds 7 of 8 pictures as wanted in everything, and " in shown and shown.count("WRONG") == 1
    assert "the background should be black" in shown


def test_a_pack_without_checkpoints_says_what_to_do(drawn: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"comes without the mini checkpoints; .*`phase-parallel demo --checkpoint random` needs none\.$"):
        mini_demo("cpu", tmp_path / "out", ranks=4, shipped=tmp_path / "nowhere")


def test_a_failure_shows_the_lines_of_the_ranks(drawn: dict[str, Any], shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(url: str) -> list[str]:
        raise LaunchError("The ranks do not agree on the result: a, b.")

    monkeypatch.setattr(module, "wait_for_equal_digests", fail)
    with pytest.raises(LaunchError, match=r"do not agree(.|\n)*what the ranks said"):
        mini_demo("cpu", tmp_path / "out", ranks=4, shipped=shipped)


@pytest.mark.parametrize(("words", "chosen"), [([], "mini"), (["--checkpoint", "mini"], "mini"), (["--checkpoint", "random"], "random")])
def test_the_command_chooses_the_checkpoint(words: list[str], chosen: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[str, int]] = []
    for name in ("mini", "random"):
        monkeypatch.setattr(f"phase_parallel.launch.demo.{name}_demo", lambda device, output, ranks, name=name: calls.append((name, ranks)))
    assert main(["demo", "--device", "cpu", "--output", str(tmp_path), *words]) == 0
    assert calls == [(chosen, 4)]


def test_an_output_that_is_no_folder_is_named_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("phase_parallel.launch.demo.mini_demo", lambda *_, **__: pytest.fail("a rank would have started"))
    (tmp_path / "file").touch()
    assert main(["demo", "--device", "cpu", "--output", str(tmp_path / "file")]) == 1
    assert f"nothing can be written into {tmp_path / 'file'} (File exists); give --output in a place that you may write to." in capsys.readouterr().err


def test_a_damaged_config_is_named_before_anything_starts(shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MINI_STATE", tmp_path / "state")
    monkeypatch.setattr(module, "Launch", lambda **_: pytest.fail("a rank would have started"))
    copy = Path(shutil.copytree(shipped, tmp_path / "copy"))
    (copy / NAMES["distil"] / "config.json").write_text("{")
    with pytest.raises(LaunchError, match=r"config\.json.*`phase-parallel demo --checkpoint random` needs none"):
        mini_demo("cpu", tmp_path / "out", ranks=4, shipped=copy)
