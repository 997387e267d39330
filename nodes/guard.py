"""Who may talk to which rank: ranks other than 0 take orders from rank 0 only.

A worker is a complete ComfyUI. A prompt, upload or interrupt that reached it directly would run beside the
section that rank 0 leads, and other packs have routes that change things on a GET, so everything needs the
launch's secret. That it refuses is also how the launcher knows that it is up.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from ..parallel.environment import LaunchEnvironment
from . import status_routes
from .queue_keeper import keep_queue
from .startup_heap import set_startup_aside

SECRET_HEADER = "X-PhaseParallel-Secret"
_log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def install(server: Any, environment: LaunchEnvironment | None) -> None:
    """Add the guard (ranks other than 0) or the status page (rank 0, or no launch) to a PromptServer that
    has not started yet.

    All hosts make the application, with its list of middlewares, before they import packs and freeze it when
    the server starts. Nothing runs before that: the cluster connects on the server's start-up, so that a rank
    is visible to the others before its first prompt.
    """
    if environment is not None and environment.rank != 0:
        server.app.middlewares.append(secret_guard(environment))
    else:
        status_routes.add_routes(server.routes, environment)
    if environment is not None:
        server.app.on_startup.append(_join_launch)
        server.app.on_startup.append(_set_startup_aside)
        if environment.rank == 0:
            server.app.on_startup.append(lambda _: _keep_queue(server, environment))


def secret_guard(environment: LaunchEnvironment) -> Callable:
    """Middleware that answers 403 to every request without the launch's secret."""
    secret = environment.secret.encode()
    sentence = (
        f"this is rank {environment.rank} of a PhaseParallel launch and takes orders from rank 0 only; "
        f"open rank 0 at {environment.url(0)}"
    )

    @web.middleware
    async def require_secret(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get(SECRET_HEADER, "").encode(errors="surrogateescape")
        if hmac.compare_digest(given, secret):
            return await handler(request)
        _log.warning("refused %s %s from %s", request.method, request.path, request.remote)
        # The shape of ComfyUI's own refusals, so that its frontend shows the sentence.
        error = {"type": "phase_parallel_rank", "message": sentence, "details": "", "extra_info": {}}
        return web.json_response({"error": error, "node_errors": {}}, status=403)

    return require_secret


async def _keep_queue(server: Any, environment: LaunchEnvironment) -> None:
    keep_queue(server, environment)


async def _set_startup_aside(_: web.Application) -> None:
    set_startup_aside()


async def _join_launch(_: web.Application) -> None:
    await asyncio.get_running_loop().run_in_executor(None, status_routes.own_cluster)
