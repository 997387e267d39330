"""``bench article``: which calls it makes, what it keeps, and what it refuses before anything is measured. The other benches are doubles here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from phase_parallel.bench import article
from phase_parallel.bench.arguments import parser
from phase_parallel.bench.article import ArticleOptions, measure
from phase_parallel.bench.article_parts import PARTS, Setting, choose_parts, choose_ranks
from phase_parallel.bench.denoise_cases import SCHEMES
from phase_parallel.bench.errors import BenchError
from phase_parallel.launch.cli import main

RESULT = {"hardware": "a device", "torch": "2", "date": "today", "commit": "abc"}


class Benches:
    """Writes a result wherever it is told to; ``fail`` holds names of benches that do not."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fail: set[str] = set()

    def __call__(self, words: list[str]) -> int:
        self.calls.append(words[0])
        if words[0] in self.fail:
            raise BenchError("the device is on fire\nrank 0: smoke")
        rows = {"ar": {"decode": [], "prefill": []}, "load": {"checkpoint_bytes": 1, "layers": 1, "scheme": "tp", "writing": PART, "disk": PART, "loads": []}}
        Path(words[words.index("--out") + 1]).write_text(json.dumps({**RESULT, **rows.get(words[0], {"rows": [], "collectives": "gloo"})}))
        return 0


PART = {"seconds": 1.0, "from_disk_bytes": None}


@pytest.fixture
def options(tmp_path: Path) -> ArticleOptions:
    return ArticleOptions(tmp_path / "article", ("ar", "load", "published"), False, None, 4, "cpu", True, None, None)


def test_what_has_a_result_is_not_measured_again(options: ArticleOptions) -> None:
    benches = Benches()
    assert measure(options, benches) == 0 and benches.calls == ["ar", "ar", "ar", "load"]
    assert sorted(path.name for path in options.out.iterdir()) == [
        "ar-hybrid.json", "ar-tp.json", "ar-tp2sp2.json", "article.md", "load.json", "published.json",
    ]  # fmt: skip
    (options.out / "ar-tp2sp2.json").unlink()
    assert measure(options, benches) == 0 and benches.calls[4:] == ["ar"]
    assert measure(options, benches) == 0 and len(benches.calls) == 5
    assert measure(replace(options, parts=("load",), again=True), benches) == 0 and benches.calls[5:] == ["load"]


def test_a_result_says_how_it_was_made(options: ArticleOptions) -> None:
    measure(replace(options, parts=("ar",)), Benches())
    block = json.loads((options.out / "ar-hybrid.json").read_text())["article"]
    assert block["command"] == "phase-parallel bench ar --scheme hybrid --ranks 4 --device cpu --scale small --repeats 1"
    assert (block["part"], block["ranks"], block["small"], block["repeats"]) == ("ar", 4, True, 1) and block["seconds"] >= 0


def test_a_call_that_fails_does_not_stop_the_others_and_is_tried_again(options: ArticleOptions, capsys: pytest.CaptureFixture[str]) -> None:
    benches = Benches()
    benches.fail = {"ar"}
    assert measure(options, benches) == 1 and benches.calls == ["ar", "ar", "ar", "load"]
    assert "failed: the device is on fire rank 0: smoke" in (options.out / "article.md").read_text()
    benches.fail = set()
    assert measure(options, benches) == 0 and benches.calls[4:] == ["ar", "ar", "ar"]
    assert "failed" not in (options.out / "article.md").read_text() and not list(options.out.glob("*.failed.json"))


def test_a_run_that_is_stopped_keeps_what_it_has(options: ArticleOptions) -> None:
    benches, stop = Benches(), Benches()

    def stopped(words: list[str]) -> int:
        if "hybrid" in words:
            raise KeyboardInterrupt
        return stop(words)

    with pytest.raises(KeyboardInterrupt):
        measure(options, stopped)
    assert {path.name for path in options.out.iterdir()} == {"ar-tp.json", "ar-tp2sp2.json", "article.md"}, "no half of a result either"
    measure(options, benches)
    assert benches.calls == ["ar", "load"]


def test_after_the_minutes_nothing_more_begins(options: ArticleOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    benches, clock = Benches(), iter(range(0, 100_000, 100))
    monkeypatch.setattr(article.time, "monotonic", lambda: next(clock))
    assert measure(replace(options, minutes=5.0), benches) == 0
    assert benches.calls == ["ar"] and "ar-tp2sp2 and what follows is left" in capsys.readouterr().out


def test_two_ranks_do_what_two_can(options: ArticleOptions) -> None:
    benches = Benches()
    assert measure(replace(options, ranks=2), benches) == 0 and benches.calls == ["ar", "load"]
    page = (options.out / "article.md").read_text()
    assert "| hybrid: TP4 on the weights of TP2 | needs 4 ranks |" in page


def test_results_of_another_setting_are_refused(options: ArticleOptions) -> None:
    measure(replace(options, parts=("load",)), Benches())
    with pytest.raises(BenchError, match="holds results of 4 ranks on cpu, toy sizes; give another --out for 2 ranks on cpu, toy sizes"):
        measure(replace(options, ranks=2), Benches())


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"article": {}}'])
def test_a_damaged_result_is_named_before_anything_is_measured(options: ArticleOptions, text: str) -> None:
    options.out.mkdir()
    (options.out / "ar-tp.json").write_text(text)
    benches = Benches()
    with pytest.raises(BenchError, match=r"ar-tp\.json .*; remove it, and the part is measured again\.$"):
        measure(options, benches)
    assert not benches.calls


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--part", "arr"], "the article has no part 'arr'; its parts are ar, denoise, e2e, node, load, switch, faults, published, curves."),
        (["--out", "{file}/x"], "nothing can be written into {file}/x (Not a directory); give --out in a place that you may write to."),
        (["--render", "{file}"], "{file} is no folder; give the one that"),
        (["--render", "{empty}"], "{empty} holds no results; run `phase-parallel bench article --out {empty}`."),
    ],
)
def test_bad_input(words: list[str], sentence: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(article, "run_call", None)
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    names = {"file": str(tmp_path / "file"), "empty": str(tmp_path / "empty")}
    usual = [] if {"--out", "--render"} & set(words) else ["--out", str(tmp_path / "new")]
    assert main(["bench", "article", "--device", "cpu", "--scale", "small", *usual, *(word.format(**names) for word in words)]) == 1
    said = capfd.readouterr().err
    assert sentence.format(**names) in said and said.count("\n") == 1


def test_too_few_gpus() -> None:
    assert (choose_ranks(None, None), choose_ranks(None, 8), choose_ranks(None, 3), choose_ranks(2, 4)) == (4, 4, 2, 2)
    with pytest.raises(BenchError, match="needs 2 GPUs and this machine has 1"):
        choose_ranks(None, 1)
    with pytest.raises(BenchError, match="needs 4 GPUs and this machine has 2"):
        choose_ranks(4, 2)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("part", PARTS)
def test_every_call_is_one_that_its_bench_takes(part: str, small: bool, ranks: int) -> None:
    setting = Setting(ranks, "cpu" if small else "cuda", small, gib=3.5, folder=Path("somewhere"))
    calls = PARTS[part](setting)
    assert calls and len({call.name for call in calls}) == len(calls)
    for call in calls:
        assert call.part == part and call.needs in (2, 4)
        if not call.words or call.needs > ranks:
            continue
        taken = parser().parse_args([*call.words, "--out", "x.json"])
        named = getattr(taken, "scheme", None)
        schemes = named if isinstance(named, list) else []
        assert all(SCHEMES[name].ranks == taken.ranks for name in schemes), call
        assert taken.device == setting.device and getattr(taken, "scale", "small" if small else "full") == ("small" if small else "full")


def test_parts_come_in_the_order_of_the_page() -> None:
    assert choose_parts(["curves", "ar"]) == ["ar", "curves"] and choose_parts([]) == list(PARTS)
