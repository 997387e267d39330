"""Points, predictions and the picture of ``bench plot``, from results as ``bench denoise`` writes them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from phase_parallel.bench.denoise_plot import plot
from phase_parallel.bench.denoise_scaling import points, predictions, print_scaling, reductions_ms
from phase_parallel.launch.cli import main

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"


def result(rows: list[dict[str, Any]], *, alone: bool = True) -> dict[str, Any]:
    about = {"hardware": "a device", "torch": "2", "date": "today", "commit": "abc", "layers": 32, "hidden_size": 4096}
    return {**about, "alone": alone, "rows": rows}


def row(scheme: str, ms: float, *, prefix: int = 1000, tokens: int = 4096, left_out: float | None = 10.0, **more: Any) -> dict[str, Any]:
    spread = {"median": ms, "minimum": ms, "maximum": ms, **more}
    return {"task": "sizes", "scheme": scheme, "prefix": prefix, "image_tokens": tokens, "ms_per_step": spread, "left_out_ms": left_out}


def test_a_point_is_the_fastest_row_with_its_collectives() -> None:
    rows = [row("hybrid4-cfg", 110.0), row("hybrid4-cfg", 100.0), row("tp2", 90.0, left_out=None), {"not_run": "no", **row("tp4", 1.0)}]
    (point,) = points(result(rows))
    assert (point.scheme, point.ranks, point.ms, point.how) == ("hybrid4-cfg", 4, 110.0, "alone")


def test_of_several_ranks_the_slowest_counts() -> None:
    (point,) = points(result([row("tp2", 200.0, left_out=0.0, slowest_rank=210.0)], alone=False))
    assert (point.ms, point.how) == (210.0, "measured")


def test_predictions_share_the_computing_and_add_the_sums() -> None:
    given = result([row("hybrid4-cfg", 100.0)])
    sums = {ranks: reductions_ms(given, ranks, 4096) for ranks in (1, 2, 4, 8)}
    assert sums[1] == 0.0 and sums[4] == pytest.approx(8.71, abs=0.01) and sums[2] == pytest.approx(2 * sums[4], rel=0.06)
    computed = 110.0 - sums[4]
    guessed = {point.ranks: point.ms for point in predictions(given)}
    assert guessed == {ranks: pytest.approx(computed * 4 / ranks + sums[ranks]) for ranks in (1, 2, 8)}
    assert all(point.how == "predicted" for point in predictions(given))


def test_two_ranks_predicted_from_four_are_slower_than_those_measured_by_an_eighth_at_most() -> None:
    """Of the results in this repository. A prediction has NCCL's sums and one branch's rows for each expert; two real ranks add through peers' memory
    and have both branches' rows, which fill the tiles better."""
    alone, two = (json.loads((RESULTS / name).read_text()) for name in ("denoise_alone_h200.json", "denoise_tp2_h200.json"))
    guessed = {point.prefix: point.ms for point in predictions(alone) if point.ranks == 2}
    for point in points(two):
        assert 1.0 < guessed[point.prefix] / point.ms < 1.125, (point, guessed)


def test_the_table_marks_what_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    print_scaling(result([row("hybrid4-cfg", 100.0), row("hybrid4-cfg", 120.0, prefix=2000)]))
    lines = capsys.readouterr().out.splitlines()
    (own,) = [line for line in lines if "hybrid4-cfg" in line]
    assert own.split()[-2:] == ["110.0", "130.0"]
    assert all(line.count("*") == 2 for line in lines if "rank" in line.split("tokens")[-1] and "hybrid" not in line and "ms of" not in line)


def test_one_case_is_no_scaling(capsys: pytest.CaptureFixture[str]) -> None:
    print_scaling(result([row("hybrid4-cfg", 100.0)]))
    assert capsys.readouterr().out == ""


def test_a_picture_of_the_curves(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "sizes.json"
    rows = [row(name, 10.0 + tokens / 100, prefix=prefix, tokens=tokens) for name in ("tp2", "hybrid4-cfg") for tokens in (64, 128) for prefix in (50, 90)]
    file.write_text(json.dumps(result(rows)))
    assert main(["bench", "plot", str(file)]) == 0
    assert (tmp_path / "sizes.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_without_matplotlib_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert main(["bench", "plot", str(RESULTS / "denoise_alone_h200.json"), "--out", str(tmp_path / "x.png")]) == 1
    assert "bench plot draws with matplotlib, which is not installed; run `python -m pip install matplotlib`." in capfd.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [1], "alone": true, "layers": 1}', '{"rows": [{}], "alone": true, "layers": 1}'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(Exception, match=r"other.json (is no result|cannot be read as a result) of bench denoise"):
        plot([file], tmp_path / "x.png")
