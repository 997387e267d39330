"""The demo's own parts; the whole of it runs in tests/workflows and by `make demo`."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phase_parallel.launch import demo_client as module
from phase_parallel.launch.demo_client import connected_to, run_prompt, upload_image, wait_for_equal_digests
from phase_parallel.launch.demo_progress import DemoProgress
from phase_parallel.launch.demo_random import CHECKPOINT_NAME, prepare_graph, save_images, small_checkpoint
from phase_parallel.launch.errors import LaunchError
from phase_parallel.launch.ports import free_port


def report(phase: str, done: int = 0, total: int = 0, **more: Any) -> dict[str, Any]:
    fields = {"phase_seconds": {}, "tokens_per_s": None, "s_per_step": None, "digest": ""}
    return {"ranks": [{"phase": phase, "done": done, "total": total, **fields, **more}]}


def test_progress_shows_each_phase_once_without_a_terminal() -> None:
    out = io.StringIO()
    progress = DemoProgress(out)
    after_ar = {"phase_seconds": {"AR prefill": 0.5, "AR decode": 1.0}}
    for status in (
        {"ranks": [None]},
        report("load", 1, 2),
        report("AR prefill", 0, 3),
        report("AR decode", 1, 3),
        report("AR decode", 3, 3, tokens_per_s=2.0),
        report("denoise", 1, 4, tokens_per_s=2.0, **after_ar),
        report("denoise", 4, 4, s_per_step=0.5, **after_ar),
        report("idle", s_per_step=0.5, phase_seconds={"denoise": 2.0}),
        report("idle", s_per_step=0.5, phase_seconds={"denoise": 2.0}),
        report("idle", phase_seconds={"denoise": 1.0, "VAE decode": 0.25}),
    ):
        progress.look(status)
    lines = out.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["load", "AR", "denoise", "VAE"]
    assert lines[0].split() == ["load", "[########################]", "2/2", "steps"]
    assert lines[1].endswith("3/3 tokens, 2.0 tokens/s") and lines[2].endswith("4/4 steps, 0.50 s/step")
    assert progress.seconds == {"AR": 1.5, "denoise": 3.0, "VAE decode": 0.25}


def test_a_phase_too_short_to_be_seen_gets_its_line() -> None:
    out = io.StringIO()
    progress = DemoProgress(out)
    progress.look(report("sample", phase_seconds={"generate_text": 0.01, "AR decode": 0.04}, tokens_per_s=50.0))
    progress.look(report("denoise", 2, 4, phase_seconds={"generate_text": 0.01, "AR decode": 0.04}))
    progress.look(report("idle", phase_seconds={"sample": 0.5, "denoise": 1.0}))
    first, second = out.getvalue().splitlines()
    assert first.split() == ["AR", "0.05", "s,", "50.0", "tokens/s"]
    assert second.startswith("denoise") and second.endswith("4/4 steps")
    assert progress.seconds == {"AR": 0.05, "denoise": 1.5}


def test_a_phase_whose_count_was_not_seen_is_done() -> None:
    out = io.StringIO()
    progress = DemoProgress(out)
    progress.look(report("AR prefill"))
    progress.look(report("denoise", 1, 4, tokens_per_s=6.0, phase_seconds={"AR decode": 0.1}))
    assert out.getvalue().split() == ["AR", "done,", "6.0", "tokens/s"]


def test_steps_of_a_stock_sampler_are_one_line() -> None:
    """Between them the ranks are idle, and the last status may come before the last step."""
    out = io.StringIO()
    progress = DemoProgress(out)
    for done in (1, 2, 3):
        progress.look(report("denoise", done, 4, unit="call"))
        progress.look(report("idle", phase_seconds={"denoise": 0.5 + done}))
    progress.end()
    (line,) = out.getvalue().splitlines()
    assert line.startswith("denoise") and line.endswith("4/4 steps")
    assert progress.seconds == {"denoise": 7.5}


def test_a_text_that_ended_before_its_limit_tells_no_count() -> None:
    out = io.StringIO()
    progress = DemoProgress(out)
    progress.look(report("AR decode", 24, 2000))
    progress.look(report("denoise", 0, 4, tokens_per_s=6.0))
    assert out.getvalue().split() == ["AR", "done,", "6.0", "tokens/s"]


def test_seconds_of_an_earlier_prompt_do_not_count() -> None:
    before = report("idle", phase_seconds={"VAE decode": 2.0})
    progress = DemoProgress(io.StringIO(), before=before)
    progress.look(before)
    progress.look(report("idle", phase_seconds={"AR decode": 1.0}))
    assert progress.seconds == {"AR": 1.0}


def test_the_graph_must_have_one_loader() -> None:
    graph = {"1": {"class_type": "A", "inputs": {"folder": "old"}}, "2": {"class_type": "B", "inputs": {}}}
    assert prepare_graph(graph, "new")["1"]["inputs"]["folder"] == "new"
    with pytest.raises(LaunchError, match="0 nodes with a checkpoint folder"):
        prepare_graph({"2": graph["2"]}, "new")


def test_the_checkpoint_is_written_once(tmp_path: Path) -> None:
    first = small_checkpoint(tmp_path)
    written = (first / "config.json").stat().st_mtime_ns
    assert first.name == CHECKPOINT_NAME
    assert small_checkpoint(tmp_path) == first and (first / "config.json").stat().st_mtime_ns == written
    assert json.loads((first / "model.safetensors.index.json").read_text())["weight_map"]


def test_images_are_kept_byte_for_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "get_bytes", lambda url: url.encode())
    image = {"filename": "a b.png", "subfolder": "", "type": "output"}
    preview = {**image, "type": "temp"}
    (saved,) = save_images("http://r", {"outputs": {"9": {"images": [preview, image]}}}, tmp_path / "out")
    assert saved.read_bytes() == b"http://r/view?filename=a+b.png&subfolder=&type=output"
    with pytest.raises(LaunchError, match="without a saved image"):
        save_images("http://r", {"outputs": {}}, tmp_path)


def test_ranks_that_disagree_fail_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [["a", "old"], ["a", "a"]]
    monkeypatch.setattr(
        module, "get_json", lambda url: {"ranks": [{"digest": digest} for digest in answers.pop(0)]}
    )
    assert wait_for_equal_digests("http://r") == ["a", "a"]
    answers = [["a", "b"]] * 1000
    monkeypatch.setattr(module, "DIGEST_WAIT_S", 0.5)
    with pytest.raises(LaunchError, match="do not agree"):
        wait_for_equal_digests("http://r")


@pytest.mark.parametrize(
    "ask",
    [
        wait_for_equal_digests,
        lambda url: upload_image(url, "a.png", b""),
        lambda url: asyncio.run(run_prompt(url, {}, DemoProgress(io.StringIO()))),
    ],
)
def test_a_rank_0_that_is_gone_is_named(ask: Callable[[str], object]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(LaunchError, match=f"^Rank 0 at {url} does not answer any more "), connected_to(url):
        ask(url)
