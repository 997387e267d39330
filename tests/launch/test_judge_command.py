"""`phase-parallel judge`: what it refuses in a sentence, what it prints, what it saves; on one rank and on four."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from random_mini import write_random_mini

from phase_parallel.launch import judge as module
from phase_parallel.launch.cli import main as command
from phase_parallel.launch.errors import LaunchError
from phase_parallel.launch.judge import main, suite_text
from phase_parallel.launch.judge_ranks import sheet_entries
from phase_parallel.train.drawing import render
from phase_parallel.train.evaluation import Outcome, mark
from phase_parallel.train.figures import grouped, language_gap
from phase_parallel.train.mini import NAMES
from phase_parallel.train.painter import Written
from phase_parallel.train.scenes import size_of
from phase_parallel.train.suites import Suite, suite_items


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> list[module.JudgeOptions]:
    """What the ranks would have been asked."""
    asked: list[module.JudgeOptions] = []

    def run(options: module.JudgeOptions) -> dict[str, Any]:
        asked.append(options)
        return {"suites": {suite: found_of(suite, 4) for suite in options.suites}}

    monkeypatch.setattr(module, "run_on_ranks", run)
    return asked


def rows_of(suite: Suite, count: int) -> Outcome:
    """Of a model that does what is wanted, but writes nothing."""
    rows, pictures = [], []
    for item in suite_items(suite, count):
        size = size_of(item.wanted.aspect)
        pictures.append(None if suite == "ratio" else render(item.wanted, *size, 0))
        rows.append(mark(item, Written("", "", size), pictures[-1]))
    return Outcome(tuple(rows), tuple(pictures), "")


def found_of(suite: Suite, count: int) -> dict[str, Any]:
    rows = rows_of(suite, count).rows
    groups = {name: {"items": items, "figures": values} for name, (items, values) in grouped(rows).items()}
    return {"groups": groups, "language_gap": language_gap(suite, rows), "seconds": 1.0, "rows": []}


def test_suites_are_those_of_the_checkpoint(no_ranks: list[module.JudgeOptions], random_mini: Path, tmp_path: Path) -> None:
    assert main([str(random_mini)]) == 0
    assert main([str(write_random_mini(tmp_path / "distil", "distil"))]) == 0
    assert main([str(random_mini), "--suite", "ratio", "--suite", "t2i", "--suite", "ratio"]) == 0
    assert [options.suites for options in no_ranks] == [("t2i", "think", "ratio", "edit1", "edit2"), ("distil",), ("ratio", "t2i")]


def test_plans_go_by_the_names_of_check(no_ranks: list[module.JudgeOptions], random_mini: Path) -> None:
    for words in (["single"], ["tp4"], ["hybrid-cfg"], ["tp", "--ranks", "2"]):
        main([str(random_mini), "--plan", *words])
    assert [(o.ranks, o.plan, o.denoise) for o in no_ranks] == [(1, "single", None), (4, "tp", None), (4, "hybrid", "cfg"), (2, "tp", None)]


def test_a_shipped_checkpoint_has_a_name(
    no_ranks: list[module.JudgeOptions], shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phase_parallel.launch.shipped_models.SHIPPED", shipped)
    monkeypatch.setattr("phase_parallel.launch.shipped_models.MINI_STATE", tmp_path)
    assert main(["distil"]) == 0
    assert no_ranks[0].checkpoint == str(tmp_path / NAMES["distil"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--count", "0"], r"--count 0 is not possible; choose 1 to 10000\."),
        (["--steps", "0"], r"--steps 0 is not possible; choose 1 to 1000\."),
        (["--steps", "1001"], r"--steps 1001 is not possible; choose 1 to 1000\."),
        (["--guidance", "nan"], r"--guidance nan is not possible; choose 1 \(none\) to 100\."),
        (["--guidance", "-5"], r"--guidance -5.0 is not possible; choose 1 \(none\) to 100\."),
        (["--sheet", "sheet.unknown"], r"--sheet sheet.unknown is no name of a PNG; let it end in \.png\."),
        (["--plan", "tensor"], r"Plan 'tensor' is unknown; choose one of single, .*, replicated\."),
        (["--plan", "tp", "--ranks", "3"], r".* cannot be split over .*"),
        (["--plan", "tp4", "--denoise", "cfg"], r".*cfg.*"),
        (["--suite", "distil"], r".* is no distilled checkpoint, which suite distil is for; choose t2i\."),
        (["--suite", "ratio", "--sheet", "sheet.png"], r"--sheet needs a suite that draws; ratio only chooses sizes\."),
        (["--out", "nowhere/rows.json"], r"nowhere/rows\.json cannot be written: nowhere must be a folder that is there, and rows\.json a file\."),
        (["--sheet", "nowhere/sheet.png"], r"nowhere/sheet\.png cannot be written: .*"),
        (["--out", "/proc/rows.json"], r"/proc/rows\.json cannot be written \(.+\); give a place that you may write to\."),
    ],
)
def test_what_cannot_be_done_is_said_before_any_rank_starts(
    words: list[str], sentence: str, no_ranks: list[module.JudgeOptions], random_mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match=f"^{sentence}$"):
        main([str(random_mini), *words])
    assert not no_ranks


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["judge", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("phase-parallel: ")


def test_a_checkpoint_of_other_sizes_is_refused(small_instruct: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(small_instruct, tmp_path / "other"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "image_base_size": 512}))
    with pytest.raises(LaunchError, match=r"draws pictures around 512 pixels, but the judge knows those of the mini model, 256\.$|size"):
        main([str(folder)])


def test_a_table_has_the_columns_that_have_values() -> None:
    lines = suite_text("t2i", found_of("t2i", 4)).splitlines()
    assert lines[0].split() == ["t2i", "items", "attributes", "exact", "kind", "colour", "size", "position", "background", "count"]
    assert [line.split()[:4] for line in lines[1:4]] == [["all", "4", "100.0", "100.0"], ["english", "2", "100.0", "100.0"], ["chinese", "2", "100.0", "100.0"]]
    assert lines[4] == "  t2i: attributes 100.0 % (goal 95 %), English minus Chinese +0.0 points (goal: within 3), 1 s"
    assert suite_text("ratio", found_of("ratio", 4)).splitlines()[0].split() == ["ratio", "items", "ratio"]


def test_edits_have_a_line_for_each_kind() -> None:
    names = [line.split()[0] for line in suite_text("edit1", found_of("edit1", 8)).splitlines()[1:]]
    assert names[:3] == ["all", "english", "chinese"] and set(names[3:-1]) == {item.edit.name for item in suite_items("edit1", 8)}


def test_one_item_has_no_language_gap() -> None:
    assert "Chinese" not in suite_text("t2i", found_of("t2i", 1)).splitlines()[-1]


def test_the_sheet_shows_pictures_and_no_sizes() -> None:
    assert len(sheet_entries(rows_of("t2i", 3))) == 3 and not sheet_entries(rows_of("ratio", 3))


def run(folder: Path, tmp_path: Path, *words: str) -> dict[str, Any]:
    assert main([str(folder), "--count", "1", "--steps", "1", "--out", str(tmp_path / "rows.json"), *words]) == 0
    return json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))


def test_one_rank_from_the_command_to_its_files(random_mini: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(random_mini, tmp_path, "--suite", "t2i", "--suite", "ratio", "--sheet", str(tmp_path / "sheet.png"))
    assert (found["checkpoint"], found["plan"], found["steps"]) == (random_mini.name, "single: one rank", 1)
    (row,) = found["suites"]["t2i"]["rows"]
    assert row["prompt"] == suite_items("t2i", 1)[0].wish.prompt and row["score"]["picture"]["total"] < 1
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert np.asarray(sheet).std() > 10
    shown = capsys.readouterr().out
    assert "t2i 1 of 1: attributes" in shown and "ratio: ratio" in shown and "Saved" in shown


@pytest.mark.ranks4
@pytest.mark.timeout(300)
def test_four_ranks_find_what_one_finds(random_mini: Path, tmp_path: Path) -> None:
    """Greedy or drawn, texts are the same; the pictures of random weights look alike to the judge."""
    one, four = (run(random_mini, tmp_path, "--suite", "ratio", "--plan", plan) for plan in ("single", "hybrid-sp-kv"))
    assert four["plan"] == "hybrid: AR TP4 · denoise TP2×SP2 (kv_gather)"
    pairs = zip(one["suites"]["ratio"]["rows"], four["suites"]["ratio"]["rows"], strict=True)
    assert all({**a, "seconds": 0} == {**b, "seconds": 0} for a, b in pairs)
