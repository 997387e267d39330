"""The guard and the status route on an aiohttp application that is built as every ComfyUI builds its own."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from phase_parallel.launch import readiness
from phase_parallel.nodes import guard, status_routes
from phase_parallel.nodes.follower import follower_nodes
from phase_parallel.nodes.guard import SECRET_HEADER
from phase_parallel.nodes.status_routes import LOGS_ROUTE, PAGE_FILES, PAGE_ROUTE, STATUS_ROUTE
from phase_parallel.parallel import process_cluster as cluster_module
from phase_parallel.parallel.environment import LaunchEnvironment

LAUNCH = LaunchEnvironment(
    rank=2,
    world_size=4,
    local_rank=2,
    store_host="127.0.0.1",
    store_port=1,
    secret="0123456789abcdef",
    launch_id="a1b2",
    ports=(8188, 8201, 8202, 8203),
    timeout_s=60.0,
    device="cpu",
    model_dirs=(),
    restart_count=0,
)


@pytest.fixture(autouse=True)
def own_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's cluster is made anew in every test, on rank 0's CPU."""
    monkeypatch.setattr(cluster_module, "_process_cluster", None)
    monkeypatch.setattr(status_routes, "own_cluster", lambda: cluster_module.process_cluster(torch.device("cpu")))


def serve(environment: LaunchEnvironment | None, visit: Callable[[TestClient], Awaitable[None]]) -> list[str]:
    """Start a stand-in for PromptServer with the guard installed, and let ``visit`` use it."""
    reached: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        reached.append(f"{request.method} {request.path}")
        return web.json_response({})

    async def run() -> None:
        queue = SimpleNamespace(mutex=threading.RLock(), queue=[], currently_running={}, history={})
        server = SimpleNamespace(app=web.Application(middlewares=[]), routes=web.RouteTableDef(), prompt_queue=queue, number=0)
        guard.install(server, environment)
        for path in ("/prompt", "/interrupt", "/free", "/upload/image", "/queue", "/history", "/other_pack/reboot"):
            for twin in (path, "/api" + path):
                server.app.router.add_route("*", twin, answer)
        server.app.add_routes(server.routes)
        async with TestClient(TestServer(server.app)) as client:
            await visit(client)

    asyncio.run(run())
    return reached


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchEnvironment]:
    """Rank 2 of a launch whose store really answers."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    environment = replace(LAUNCH, store_port=store.port)
    for name, value in environment.to_environ().items():
        monkeypatch.setenv(name, value)
    yield environment
    if cluster_module._process_cluster is not None:
        cluster_module._process_cluster.close()


CHANGING = [
    prefix + path
    for prefix in ("", "/api")
    for path in ("/prompt", "/interrupt", "/free", "/upload/image", "/queue", "/history")
]


def test_a_worker_refuses_what_does_not_come_from_rank_0(joined: LaunchEnvironment) -> None:
    async def visit(client: TestClient) -> None:
        for path in CHANGING:
            for headers in (
                {},
                {SECRET_HEADER: ""},
                {SECRET_HEADER: "0123456789abcdeF"},
                {SECRET_HEADER: "ü"},
            ):
                async with client.post(path, json={}, headers=headers) as refused:
                    assert refused.status == 403
                    message = (await refused.json())["error"]["message"]
            assert message == (
                "this is rank 2 of a PhaseParallel launch and takes orders from rank 0 only; "
                "open rank 0 at http://127.0.0.1:8188"
            )
        async with client.delete("/queue") as refused:
            assert refused.status == 403

    assert serve(joined, visit) == []


@pytest.mark.parametrize("addresses", [(), ("127.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2")], ids=["loopback", "several machines"])
def test_a_worker_refuses_to_be_read_too(joined: LaunchEnvironment, addresses: tuple[str, ...]) -> None:
    """Other packs have routes that change things on a GET, and what is there to read may be the user's."""

    async def visit(client: TestClient) -> None:
        for path in ("/history", "/api/queue", "/ws", "/other_pack/reboot", "/", STATUS_ROUTE):
            for method in ("GET", "HEAD", "OPTIONS"):
                for headers in ({}, {SECRET_HEADER: "0123456789abcdeF"}):
                    async with client.request(method, path, headers=headers) as refused:
                        assert refused.status == 403, (method, path)
            async with client.get(path) as refused:
                assert (await refused.json())["error"]["message"].startswith("this is rank 2 of a PhaseParallel launch and takes orders from rank 0 only")
        async with client.get("/other_pack/reboot", headers={SECRET_HEADER: joined.secret}) as answer:
            assert answer.status == 200

    assert serve(replace(joined, addresses=addresses), visit) == ["GET /other_pack/reboot"]


def test_the_launcher_sees_that_a_worker_is_up_by_its_refusal(joined: LaunchEnvironment) -> None:
    async def visit(client: TestClient) -> None:
        up = await asyncio.get_running_loop().run_in_executor(None, lambda: readiness.answers(str(client.make_url("")).rstrip("/")))
        assert up

    assert serve(joined, visit) == []


def test_a_worker_obeys_the_secret(joined: LaunchEnvironment) -> None:
    async def visit(client: TestClient) -> None:
        for path in CHANGING:
            async with client.post(path, headers={SECRET_HEADER: joined.secret}) as answer:
                assert answer.status == 200
        for route in (STATUS_ROUTE, LOGS_ROUTE, PAGE_ROUTE):
            async with client.get(route, headers={SECRET_HEADER: joined.secret}) as answer:
                assert answer.status == 404, "only rank 0 has the status of all"

    assert serve(joined, visit) == [f"POST {path}" for path in CHANGING]


def test_a_worker_is_visible_before_its_first_prompt(joined: LaunchEnvironment) -> None:
    async def visit(client: TestClient) -> None:
        cluster = cluster_module._process_cluster
        assert cluster is not None
        record = cluster.records()[2]
        assert (record["rank"], record["url"]) == (2, "http://127.0.0.1:8202")

    serve(joined, visit)


def test_rank_0_is_open_and_shows_the_status(
    joined: LaunchEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero = replace(joined, rank=0, local_rank=0)
    for name, value in zero.to_environ().items():
        monkeypatch.setenv(name, value)

    async def visit(client: TestClient) -> None:
        async with client.post("/prompt") as answer:
            assert answer.status == 200
        async with client.get(STATUS_ROUTE) as answer:
            status: dict[str, Any] = await answer.json()
        assert (status["launch_id"], status["world_size"], status["plan"]) == ("a1b2", 4, "")
        assert [record and record["rank"] for record in status["ranks"]] == [0, None, None, None]
        assert zero.secret not in str(status)

    assert serve(zero, visit) == ["POST /prompt"]


def test_rank_0_shows_the_ends_of_all_logs_and_nothing_else(joined: LaunchEnvironment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written = tmp_path / "logs" / "run" / "attempt_0" / "2" / "stderr.log"
    written.parent.mkdir(parents=True)
    written.write_text("first\nsecond\nthird\n")
    zero = replace(joined, rank=0, local_rank=0, logs=str(tmp_path / "logs"))
    for name, value in zero.to_environ().items():
        monkeypatch.setenv(name, value)

    async def visit(client: TestClient) -> None:
        async with client.get(f"{LOGS_ROUTE}?rank=2&lines=2") as answer:
            assert await answer.json() == {"rank": 2, "lines": ["second", "third"]}
        async with client.get(f"{LOGS_ROUTE}?rank=3") as answer:
            assert (await answer.json())["lines"] == []
        for query in ("", "?rank=4", "?rank=-1", "?rank=../2", "?rank=2&lines=501", "?rank=2&lines=x", "?rank=²"):
            async with client.get(LOGS_ROUTE + query) as answer:
                assert answer.status == 400, query
                assert (await answer.json())["error"] == "logs needs rank=0 to 3 and lines=0 to 500"

    serve(zero, visit)


def test_the_page_of_the_ranks_has_its_files_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PHASE_PARALLEL_STORE", raising=False)

    async def visit(client: TestClient) -> None:
        for path in ("", *(f"/{name}" for name in PAGE_FILES)):
            async with client.get(PAGE_ROUTE + path) as answer:
                assert answer.status == 200, path
        for path in ("/ranks_panel.js", "/../web/show_text.js", "/..%2f..%2fpyproject.toml"):
            async with client.get(PAGE_ROUTE + path) as answer:
                assert answer.status == 404, path
        async with client.get(f"{LOGS_ROUTE}?rank=0") as answer:
            assert "was not started by `phase-parallel up`" in (await answer.json())["error"]

    serve(None, visit)


def test_collections_leave_out_what_lives_since_the_start(joined: LaunchEnvironment) -> None:
    async def visit(client: TestClient) -> None:
        assert gc.get_freeze_count() > 10000

    gc.unfreeze()
    serve(joined, visit)
    gc.unfreeze()


def test_without_a_launch_everything_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PHASE_PARALLEL_STORE", raising=False)

    async def visit(client: TestClient) -> None:
        assert cluster_module._process_cluster is None, "nothing starts before it is asked for"
        async with client.post("/prompt") as answer:
            assert answer.status == 200
        async with client.get(STATUS_ROUTE) as answer:
            status = await answer.json()
        assert status["world_size"] == 1 and status["ranks"][0]["pid"]

    assert serve(None, visit) == ["POST /prompt"]


def test_the_follower_exists_on_followers_only(
    joined: LaunchEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    (node,) = follower_nodes().values()
    assert node.OUTPUT_NODE and node.RETURN_TYPES == ()
    changed = node.IS_CHANGED(session=1, prompt_id="a")
    assert changed != changed, "never cached"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("PHASE_PARALLEL_PORT", "8188")
    assert follower_nodes() == {}
    monkeypatch.delenv("PHASE_PARALLEL_STORE")
    assert follower_nodes() == {}


def test_importing_the_nodes_of_control_starts_nothing() -> None:
    code = (
        "import sys, threading, phase_parallel.nodes.driver, phase_parallel.nodes.guard\n"
        "import torch\n"
        "from phase_parallel.parallel import process_cluster\n"
        "assert threading.active_count() == 1 and process_cluster._process_cluster is None\n"
        "assert not torch.distributed.is_initialized() and 'comfy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=Path(__file__).parent)
