"""``bench node``: a whole launch with toy sizes on the CPU, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from phase_parallel.bench.ar import TASKS, prompt_row, prompt_text
from phase_parallel.bench.errors import BenchError
from phase_parallel.bench.node import NodeOptions, bench_row, text_graph
from phase_parallel.bench.node_client import NodeRun, run_graph
from phase_parallel.bench.release import SMALL, from_spec, write_release
from phase_parallel.launch.cli import main

OWN = "HunyuanImage3Loader"
OPTIONS = NodeOptions("tp", 2, "cpu", 2, True, 40, 1, 1, None)


async def websocket(request: web.Request) -> web.WebSocketResponse:
    """A host's, which tells nothing."""
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    async for _ in socket:
        pass
    return socket


def ar_result(path: Path, **changes: object) -> Path:
    rows = [
        {"task": "t2i", "decode": "eager", "reduction": "process group", "ms_per_token": {"median": 9.0}},
        {"task": "t2i", "decode": "graph", "reduction": "peer memory", "ms_per_token": {"median": 4.0}},
        {"task": "ti2i", "decode": "graph", "reduction": "peer memory", "ms_per_token": {"median": 3.0}},
    ]
    path.write_text(json.dumps({"ranks": 2, "layers": 2, "alone": False, "commit": "abc", "decode": rows} | changes))
    return path


def bar_is_throttled() -> bool:
    """Newer ComfyUIs send a bar's news at most every 0.1 s. The one that is obtained where none is named sends all of it."""
    named = os.environ.get("COMFYUI_DIR")
    return bool(named) and "PROGRESS_THROTTLE" in (Path(named) / "comfy" / "utils.py").read_text(encoding="utf-8")


@pytest.mark.host
@pytest.mark.timeout(600)
def test_two_ranks_write_cancel_and_write_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, compare = tmp_path / "node.json", ar_result(tmp_path / "ar.json")
    words = ["--device", "cpu", "--scale", "small", "--ranks", "2", "--tokens", "40", "--repeats", "1", "--cancels", "1"]
    assert main(["bench", "node", *words, "--compare", str(compare), "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    (run,) = result["runs"]
    assert (run["tokens"], run["way"], result["prompt_tokens"]) == (40, "eager, process group", 1251 // 8)
    if bar_is_throttled():
        assert 2 <= run["messages"] <= 11
    else:
        assert run["messages"] == 11, "one after the prompt, then one every four tokens"
    assert run["ms_per_token_websocket"] > 0 and run["ms_per_token_node"] > 0
    assert len(result["cancel_ms"]["all"]) == len(result["next_prompt_ms"]) == 1 and 0 < result["cancel_ms"]["median"] < 5_000
    assert len(result["digests"]) == 2 and len(set(result["digests"])) == 1
    assert result["bench"]["ms_per_token"] == 4.0
    printed = capfd.readouterr().out
    assert "bench ar 4.000: +" in printed and "100 %" in printed


def test_the_fastest_row_of_the_same_setting_is_compared(tmp_path: Path) -> None:
    path = ar_result(tmp_path / "ar.json")
    assert bench_row(replace(OPTIONS, compare=path)) == {"decode": "graph", "reduction": "peer memory", "ms_per_token": 4.0, "commit": "abc"}
    with pytest.raises(BenchError, match="run bench ar with the settings of bench node"):
        bench_row(replace(OPTIONS, compare=ar_result(path, layers=3)))


def test_graph_is_the_published_one_without_what_draws() -> None:
    graph, node = text_graph("a cat", OPTIONS)
    assert {value["class_type"] for value in graph.values()} == {"HunyuanImage3Loader", "HunyuanImage3Rewrite"}
    assert graph[node]["inputs"]["prompt"] == "a cat"
    assert {value["inputs"].get("plan") for value in graph.values()} == {"tp", None}


def test_every_token_has_a_text_and_prompts_keep_their_length(tmp_path: Path) -> None:
    built, toy = write_release(tmp_path / "full", SMALL), from_spec(SMALL)
    assert built.tokenizer.special == toy.tokenizer.special and built.tokenizer.ratio_ids == toy.tokenizer.ratio_ids
    assert all(built.tokenizer.decode([number]) for number in range(SMALL.vocab))
    task = replace(TASKS[0], tokens=200)
    assert prompt_row(built, task).tokens == prompt_row(toy, task).tokens
    assert len(prompt_row(built, task)) == 200 and len(prompt_text(built, task)) < 200


def test_speed_leaves_out_the_first_tokens() -> None:
    run = NodeRun(progress=[(1.0, 1), (3.0, 5), (3.1, 9), (3.2, 13), (3.5, 17)])
    assert run.steady_ms(4) == pytest.approx(500 / 12)
    assert run.longest_pause_ms(4) == pytest.approx(300)
    with pytest.raises(BenchError, match="ended after 17 tokens"):
        run.steady_ms(16)


def test_on_the_cpu_only_the_small_scale(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "node", "--device", "cpu"]) == 1
    assert capsys.readouterr().err == "phase-parallel: bench node --device cpu only tries the program; add --scale small.\n"


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        (["Known", OWN], "^this ComfyUI has no node New, which the graph needs; set COMFYUI_DIR to one of version 0.3.64 or newer; .* its reason$"),
        (["Known", "New"], f"^rank 0 has no node {OWN}: its ComfyUI did not load the pack, and its log says why; rank 0 refused the graph: its reason$"),
        (["Known", "New", OWN], "^rank 0 refused the graph: its reason$"),
        (None, "^rank 0 refused the graph: its reason$"),
    ],
)
def test_a_refused_graph_names_the_node_that_is_not_there(nodes: list[str] | None, why: str) -> None:
    """None: the host does not answer the question which nodes it has."""

    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=500, text="its reason")

    async def describe(request: web.Request) -> web.Response:
        return web.Response(status=500) if nodes is None else web.json_response({name: {} for name in nodes})

    async def post() -> None:
        host = web.Application()
        host.router.add_get("/ws", websocket)
        host.router.add_post("/prompt", refuse)
        host.router.add_get("/object_info", describe)
        async with TestServer(host) as server:
            graph = {key: {"class_type": key, "inputs": {}} for key in ("Known", "New", OWN)}
            await run_graph(str(server.make_url("")).rstrip("/"), graph, "Known", limit_s=20.0)

    with pytest.raises(BenchError, match=why):
        asyncio.run(post())


def test_a_host_that_ends_while_it_is_asked_is_named() -> None:
    async def end(request: web.Request) -> web.Response:
        request.transport.close()
        return web.Response()

    async def post() -> None:
        host = web.Application()
        host.router.add_get("/ws", websocket)
        host.router.add_post("/prompt", end)
        async with TestServer(host) as server:
            await run_graph(str(server.make_url("")).rstrip("/"), {}, "1", limit_s=20.0)

    with pytest.raises(BenchError, match=r"^rank 0 at http://127\.0\.0\.1:\d+ does not answer any more \("):
        asyncio.run(post())
