"""``bench node --task picture``: a whole launch with toy sizes on the CPU, its graph, its figures, and what it refuses."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from phase_parallel.bench.ar import TASKS
from phase_parallel.bench.errors import BenchError
from phase_parallel.bench.node_client import NodeRun
from phase_parallel.bench.node_picture import PictureGraph, PictureOptions, bench_row, figures, picture_graph
from phase_parallel.bench.release import SMALL, write_release
from phase_parallel.launch.cli import main
from phase_parallel.launch.find_host import find_host
from phase_parallel.models.hunyuan_image_3.sequence import build_image_rows

OPTIONS = PictureOptions("tp", 2, "cpu", 2, True, 4, 1, 1, None)
PICTURE = PictureGraph({}, "5", "6", "2", "7")


def denoise_result(path: Path, **changes: object) -> Path:
    def row(scheme: str, median: float, **more: str) -> dict[str, object]:
        usual = {"task": "t2i", "scheme": scheme, "moe": "one piece, triton", "cfg": "batched", "launch": "eager"}
        return usual | {"ms_per_step": {"median": median}} | more

    rows = [
        row("tp2", 9.0),
        row("tp2", 4.0, launch="graph"),
        row("tp2", 3.0, task="ti2i"),
        row("tp2", 3.0, cfg="serial"),
        row("tp2", 3.0, moe="expert_major multi_micro, triton"),
        row("tp2", 3.0, moe="micro_major two_dispatch, triton"),
        row("hybrid4-cfg", 3.0),
    ]
    path.write_text(json.dumps({"ranks": 2, "layers": 2, "alone": False, "commit": "abc", "rows": rows} | changes))
    return path


@pytest.mark.host
@pytest.mark.timeout(900)
def test_two_ranks_draw_cancel_and_draw_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    host = find_host(print, comfy_dir=os.environ.get("COMFYUI_DIR"))
    if not (host.root / "comfy" / "patcher_extension.py").is_file():
        pytest.skip("this ComfyUI has no flow sampling; set COMFYUI_DIR to a newer one")
    out, compare = tmp_path / "picture.json", denoise_result(tmp_path / "denoise.json")
    words = ["--device", "cpu", "--scale", "small", "--ranks", "2", "--steps", "4", "--repeats", "1", "--cancels", "1"]
    assert main(["bench", "node", "--task", "picture", *words, "--compare", str(compare), "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    (run,) = result["runs"]
    assert (run["steps"], run["messages"], run["previews"], run["pictures"]) == (4, 4, 4, 1)
    assert (result["prefix"], result["width"], result["height"]) == (1251 // 8, 256, 256)
    assert run["ms_per_step_page"] > 0 and 0 < run["sampler_s"] < run["picture_s"]
    assert run["digest"] != result["digests"][0], "another seed each time"
    assert len(result["digests"]) == 2 and len(set(result["digests"])) == 1
    assert len(result["cancel_ms"]["all"]) == len(result["next_prompt_ms"]) == 1
    printed = capfd.readouterr().out
    assert "bench denoise 4.00: +" in printed and "Another prompt of that length" in printed


def test_graph_is_the_published_one_with_the_prefix_of_the_task(tmp_path: Path) -> None:
    built, task = write_release(tmp_path / "small", SMALL), replace(TASKS[0], tokens=200)
    found = picture_graph(built, task, OPTIONS)
    assert [value["class_type"] for value in found.graph.values()] == [
        "HunyuanImage3Loader", "PrimitiveStringMultiline", "HunyuanImage3Rewrite", "HunyuanImage3Encode", "KSampler", "VAEDecode", "SaveImage",
    ]  # fmt: skip
    assert found.graph["1"]["inputs"]["plan"] == "tp"
    prompt, rewrite = found.graph[found.prompt]["inputs"]["value"], found.graph["3"]["inputs"]
    rows = build_image_rows(
        built.tokenizer, built.config, prompt=prompt, system_prompt=None, cot_text=None, cond_images=(), height=rewrite["height"], width=rewrite["width"]
    )
    assert (rows.cond.prefix_length, rows.height, rows.width) == (200, 256, 256)


def drawn(**changes: object) -> NodeRun:
    run = NodeRun(
        progress=[(2.0, 1), (2.1, 2), (2.4, 3), (2.5, 4)], previews=[2.0, 2.1], started={"1": 0.1, "5": 1.5, "6": 2.6}, ended_s=3.0,
        outputs={"7": {"images": [{}]}},
    )  # fmt: skip
    return replace(run, **changes)


def test_figures_of_what_the_page_saw() -> None:
    found = figures(drawn(), PICTURE, 4)
    assert found["ms_per_step_page"] == pytest.approx(100) and found["longest_step_ms"] == pytest.approx(300)
    assert found["ms_per_step_whole"] == pytest.approx(1100 / 4) and found["first_step_ms"] == pytest.approx(500)
    assert (found["messages"], found["previews"], found["pictures"]) == (4, 2, 1)
    assert found["decode_and_save_s"] == pytest.approx(0.4)


def test_messages_that_the_host_leaves_out_count_as_steps() -> None:
    assert figures(drawn(progress=[(2.0, 1), (2.4, 5)]), PICTURE, 5)["ms_per_step_page"] == pytest.approx(100)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"progress": [(2.0, 1)]}, "told of 1 steps, too few"),
        ({"outputs": {}}, "without a picture"),
        ({"started": {"6": 2.6}}, "without a picture"),  # the sampler was cached
    ],
)
def test_runs_that_measure_nothing(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(BenchError, match=sentence):
        figures(drawn(**changes), PICTURE, 4)


def test_the_fastest_row_of_the_same_setting_is_compared(tmp_path: Path) -> None:
    path = denoise_result(tmp_path / "denoise.json")
    want = {"scheme": "tp2", "moe": "one piece, triton", "cfg": "batched", "launch": "graph", "ms_per_step": 4.0, "commit": "abc"}
    assert bench_row(replace(OPTIONS, compare=path)) == want
    with pytest.raises(BenchError, match="has no row of t2i, plan replicated"):
        bench_row(replace(OPTIONS, scheme="replicated", compare=path))
    with pytest.raises(BenchError, match="run bench denoise with the settings of bench node"):
        bench_row(replace(OPTIONS, compare=denoise_result(path, layers=3)))


@pytest.mark.parametrize("words", [["--tokens", "8", "--task", "picture"], ["--steps", "8"]])
def test_lengths_belong_to_their_task(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "node", "--device", "cpu", "--scale", "small", *words]) == 1
    assert "--tokens belongs to --task text and --steps to --task picture" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "why"), [(None, "No such file"), ("x", "Expecting value"), ("{}", "is no result of bench denoise"), ("[]", "is no result")])
def test_a_file_that_cannot_be_compared_is_refused_before_anything_starts(text: str | None, why: str, tmp_path: Path) -> None:
    file = tmp_path / "denoise.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(BenchError, match=why):
        bench_row(replace(OPTIONS, compare=file))
