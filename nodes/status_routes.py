"""What rank 0 answers about all ranks: their status and the ends of their logs as JSON, and a page that shows both.

Everything here is a GET and changes nothing. File names come from a fixed list and never from the request.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from ..parallel.cluster import Cluster
from ..parallel.environment import LaunchEnvironment
from ..parallel.process_cluster import process_cluster
from ..parallel.rank_logs import MAXIMUM_LINES, last_lines

STATUS_ROUTE = "/phase_parallel/status"
LOGS_ROUTE = "/phase_parallel/logs"
PAGE_ROUTE = "/phase_parallel/ui"
PAGE = "ranks.html"
PAGE_FILES = ("ranks_view.js", "ranks.css")
"""What the page loads; the side panel loads the same files as an extension of ComfyUI's page."""
SILENT_S = 5.0
DEFAULT_LINES = 100

_WEB = Path(__file__).resolve().parent.parent / "web"


def add_routes(routes: web.RouteTableDef, environment: LaunchEnvironment | None) -> None:
    """``environment`` None: a ComfyUI of one rank, whose log its own terminal shows."""
    logs = Path(environment.logs) if environment is not None and environment.logs else None
    ranks = 1 if environment is None else environment.world_size

    async def answer_status(_: web.Request) -> web.Response:
        # The store is read with blocking calls, which must not hold the event loop.
        return web.json_response(await _in_thread(lambda: read_status(own_cluster())))

    async def answer_logs(request: web.Request) -> web.Response:
        if logs is None:
            return _refuse(404, "this ComfyUI was not started by `phase-parallel up`; its own terminal has its log")
        rank, count = request.query.get("rank", ""), request.query.get("lines", str(DEFAULT_LINES))
        if not _is_number(rank, ranks - 1) or not _is_number(count, MAXIMUM_LINES):
            return _refuse(400, f"logs needs rank=0 to {ranks - 1} and lines=0 to {MAXIMUM_LINES}")
        lines = await _in_thread(lambda: last_lines(logs, int(rank), int(count)))
        return web.json_response({"rank": int(rank), "lines": lines})

    async def answer_page(_: web.Request) -> web.FileResponse:
        return _file(PAGE)

    routes.get(STATUS_ROUTE)(answer_status)
    routes.get(LOGS_ROUTE)(answer_logs)
    routes.get(PAGE_ROUTE)(answer_page)
    for name in PAGE_FILES:
        routes.get(f"{PAGE_ROUTE}/{name}")(_file_handler(name))


def read_status(cluster: Cluster) -> dict[str, Any]:
    """Launch id, world size, rank 0's plan, this moment, and the latest record of every rank (null for one that has not
    started).
    """
    cluster.publish_record()
    records = cluster.records()
    plan = records[0]["plan"] if records[0] else ""
    return {
        "launch_id": cluster.launch_id,
        "world_size": cluster.world_size,
        "plan": plan,
        "at": time.time(),
        "silent": list(cluster.stale_ranks(SILENT_S)),
        "ranks": records,
    }


def own_cluster() -> Cluster:
    # Without a launch only the device is unknown here, and rank 0's device is the one ComfyUI picked.
    if LaunchEnvironment.from_environ(os.environ) is not None:
        return process_cluster(torch.device("cpu"))
    from .comfy_host import ComfyHost

    return process_cluster(ComfyHost().device())


async def _in_thread(function: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, function)


def _is_number(text: str, most: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 6 and int(text) <= most


def _refuse(status: int, sentence: str) -> web.Response:
    return web.json_response({"error": sentence}, status=status)


def _file(name: str) -> web.FileResponse:
    # Asked for again each time: after an update of the pack a page must not mix old files with new ones.
    return web.FileResponse(_WEB / name, headers={"Cache-Control": "no-cache"})


def _file_handler(name: str) -> Any:
    async def answer(_: web.Request) -> web.FileResponse:
        return _file(name)

    return answer
