"""The page of ``bench article``: from results in this repository, as if they came from four ranks; aims, misses, missing rows, figures of others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from phase_parallel.bench.article import render
from phase_parallel.bench.article_aims import AIMS, missed
from phase_parallel.bench.article_page import article_page
from phase_parallel.bench.article_parts import PARTS, Setting
from phase_parallel.bench.article_results import Results, read_results
from phase_parallel.bench.article_tables import published_table, table
from phase_parallel.bench.published import ROWS, published_of, result
from phase_parallel.launch.cli import main

MEASURED = Path(__file__).resolve().parents[2] / "bench" / "results"
FILES = {"ar-tp": "ar_tp2_h200", "denoise-tp": "denoise_tp2_h200", "e2e-tp": "e2e_tp2_h200", "curves-tp2": "denoise_sizes_tp2_h200"}


def keep(folder: Path, name: str, values: dict[str, Any], *, ranks: int = 4, small: bool = False) -> None:
    call = next(call for part in PARTS.values() for call in part(Setting(ranks, "cuda", small)) if call.name == name)
    block = {"part": call.part, "name": name, "title": call.title, "command": "a command", "repeats": 5, "seconds": 61.0, "date": "2026-11-30 10:00"}
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(values | {"article": {**block, "ranks": ranks, "device": "cuda", "small": small}}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, file in FILES.items():
        keep(tmp_path / "a", name, json.loads((MEASURED / f"{file}.json").read_text()))
    keep(tmp_path / "a", "published", result())
    return tmp_path / "a"


def rows_of(page: str, words: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|") and words in line]


def test_aims_are_judged_and_misses_are_explained(folder: Path) -> None:
    render(folder)
    page = (folder / "article.md").read_text()
    (token,) = rows_of(page, "a token, T2I")
    assert token[1:5] == ["46.333 ms", "≤ 2.6 ms", "3.82 ms", "**no**"] and "peer memory" in token[5]
    assert rows_of(page, "hybrid below fixed TP4, a token")[0][4] == "not measured"
    (miss,) = [line for line in page.splitlines() if line.startswith("* a guided step, T2I: ")]
    assert "ms above the aim. Largest parts in ms: experts " in miss and re.search(r"The aim is met when \d+ % of the whole goes", miss)
    assert "NVIDIA H200" in page and "commit b69384a, 231a3b3" in page


def test_other_machines_and_toy_sizes_get_no_verdict(folder: Path) -> None:
    for name in FILES:
        keep(folder, name, json.loads((folder / f"{name}.json").read_text()), ranks=2)
    keep(folder, "published", result(), ranks=2)
    results = read_results(folder)
    assert missed(results) == [] and results.setting == Setting(2, "cuda", False)
    page = article_page(results, drawn="")
    assert "No verdict (the limits are for 4 × H200, and this is 2 ranks on cuda (NVIDIA H200))." in page and "**no**" not in page


def test_met_aims_are_no_misses(folder: Path) -> None:
    values = json.loads((folder / "ar-tp.json").read_text())
    for row in values["decode"]:
        row["ms_per_token"] = {"median": 2.0, "minimum": 1.9, "maximum": 2.1, "slowest_rank": 2.5}
    keep(folder, "ar-tp", values)
    names = [aim.what for aim, _ in missed(read_results(folder))]
    assert "a token, T2I, prompt of 1,251" not in names and "prefill of 1,251" in names
    values["decode"][0]["ms_per_token"]["slowest_rank"] = 9.0
    page = article_page(read_results(folder), drawn="")
    assert "2.500 (1.900 … 2.100)" in page, "the slowest rank counts"


def test_less_than_two_dispatches_in_percent(folder: Path) -> None:
    def row(moe: str, ms: float) -> dict[str, Any]:
        return {"task": "t2i", "moe": moe, "ms_per_step": {"median": ms}}

    rows = [
        row("micro_major multi_micro, triton", 90.0), row("micro_major two_dispatch, triton", 120.0), row("micro_major two_dispatch, flashinfer", 100.0),
        row("micro_major multi_micro, flashinfer", 10.0), {"not_run": "no", **row("micro_major two_dispatch, grouped_mm", 1.0)},
    ]  # fmt: skip
    results = Results({"denoise-experts": {"rows": rows, "article": {"title": "experts"}}}, {}, Setting(4, "cuda", False))
    aim = next(aim for aim in AIMS if aim.what == "multi-micro below two dispatches, T2I step")
    assert aim.find(results).value == pytest.approx(10.0) and aim.met(10.0) and not aim.met(5.0)


def test_missing_rows_stand_in_their_tables(folder: Path) -> None:
    (folder / "e2e-hybrid.failed.json").write_text(json.dumps({"failed": "no | room", "article": json.loads((folder / "ar-tp.json").read_text())["article"]}))
    page = article_page(read_results(folder), drawn="not measured yet")
    assert rows_of(page, "hybrid: AR TP4, denoise TP2×CFG2")[0][1].startswith("failed: no \\")
    assert rows_of(page, "a killed rank")[0][1] == "not measured yet"


def test_the_page_comes_from_the_files_alone(folder: Path) -> None:
    assert main(["bench", "article", "--render", str(folder)]) == 0
    first = (folder / "article.md").read_text()
    (folder / "article.md").unlink()
    assert main(["bench", "article", "--render", str(folder)]) == 0
    assert (folder / "article.md").read_text() == first


def test_curves_are_drawn(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    render(folder)
    assert (folder / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and "](curves.png)" in (folder / "article.md").read_text()


def test_published_figures_have_a_source_and_a_date() -> None:
    for row in ROWS:
        assert row.source and row.measured and re.fullmatch(r"2026-\d\d-\d\d", row.date), row
        assert any(value is not None for value in (row.ms_prefill, row.ms_per_token, row.ms_per_step, row.e2e_s)), row
    systems = " ".join(row.system for row in ROWS)
    assert all(name in systems for name in ("LightX2V", "FlexTP", "Flying Serving", "Moebius", "ReMP"))


def test_aims_stand_beside_the_published_figures() -> None:
    t2i, ti2i = published_of("LightX2V, hybrid", "t2i"), published_of("LightX2V, hybrid", "ti2i")
    wanted = [t2i.ms_per_token, ti2i.ms_per_token, t2i.ms_prefill, ti2i.ms_prefill, t2i.ms_per_step, ti2i.ms_per_step, t2i.e2e_s, ti2i.e2e_s]
    assert [aim.published for aim in AIMS[:8]] == wanted


def test_unknown_figures_stay_empty_and_theirs_are_marked(folder: Path) -> None:
    lines = published_table(read_results(folder))
    assert lines[0].startswith("Theirs, not figures of this pack.")
    (flex,) = [line for line in lines if line.startswith("| FlexTP") and "| t2i |" in line]
    assert "| t2i |  | 53.9 | 287 |  |" in flex
    assert sum(line.startswith("| ours: ") for line in lines) == 2


def test_a_cell_cannot_break_its_table() -> None:
    assert table(("a",), [["x | y\nz"]])[-1] == "| x \\| y z |"
