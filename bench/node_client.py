"""A user of rank 0's ComfyUI with a clock: posts a graph, reads the websocket, presses cancel."""

from __future__ import annotations

import asyncio
import json
import struct
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from .errors import BenchError

Graph = dict[str, dict[str, Any]]
HISTORY_S = 10.0
TEXT_EVENT = 3
"""First number of a binary message that is text for a node; all others are preview pictures."""


@dataclass
class NodeRun:
    """One prompt. Times in seconds since it was posted."""

    progress: list[tuple[float, int]] = field(default_factory=list)
    """When the page was told how many tokens or steps of the node are there."""
    previews: list[float] = field(default_factory=list)
    """When it was sent a preview picture."""
    started: dict[str, float] = field(default_factory=dict)
    """When each node began; one that was cached did not."""
    outputs: dict[str, Any] = field(default_factory=dict)
    """What each node left on the page at the end, from the history."""
    shown: str = ""
    """The text among them that the node shows."""
    ended_s: float = 0.0
    cancel_ms: float | None = None
    """From pressing cancel to the message that the prompt was interrupted; None where the prompt ended first."""

    def steady_ms(self, skip: int) -> float:
        """Milliseconds a token as the page sees them, from the first message with more than ``skip`` tokens on."""
        later = [(at, count) for at, count in self.progress if count > skip]
        if len(later) < 2:
            raise BenchError(f"the text ended after {self.progress[-1][1] if self.progress else 0} tokens, too few to measure; give more --tokens")
        return (later[-1][0] - later[0][0]) * 1e3 / (later[-1][1] - later[0][1])

    def longest_pause_ms(self, skip: int) -> float:
        later = [at for at, count in self.progress if count > skip]
        return max((b - a) * 1e3 for a, b in pairwise(later))


async def run_graph(
    url: str,
    graph: Graph,
    node: str,
    *,
    cancel_at: int | None = None,
    on_load: Callable[[int, int], None] = lambda done, total: None,
    on_progress: Callable[[int], None] = lambda count: None,
    limit_s: float,
) -> NodeRun:
    """``node``: the node of ``graph`` whose progress counts and goes to ``on_progress``. ``cancel_at``: press cancel once so many of its tokens or
    steps are there. ``on_load``: progress of the other nodes.

    Raises BenchError when the graph is refused or fails, and when rank 0 is gone.
    """
    import aiohttp  # comes with every ComfyUI

    try:
        return await asyncio.wait_for(_run(url, graph, node, cancel_at, on_load, on_progress), limit_s)
    except TimeoutError:
        raise BenchError(f"a prompt was not finished after {limit_s:.0f} s") from None
    except (aiohttp.ClientError, ConnectionError) as error:
        raise BenchError(f"rank 0 at {url} does not answer any more ({error})") from error


async def _run(
    url: str, graph: Graph, node: str, cancel_at: int | None, on_load: Callable[[int, int], None], on_progress: Callable[[int], None]
) -> NodeRun:
    import aiohttp  # comes with every ComfyUI

    client, run = uuid.uuid4().hex, NodeRun()
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/ws?clientId={client}", max_msg_size=0) as socket:
        began = time.perf_counter()
        async with session.post(f"{url}/prompt", json={"prompt": graph, "client_id": client}) as answer:
            if answer.status != 200:
                raise BenchError(await _why_refused(session, url, graph, await answer.text()))
            prompt_id = (await answer.json())["prompt_id"]
        cancelling: asyncio.Task[float] | None = None
        end = ""
        async for message in socket:
            now = time.perf_counter()
            if message.type is aiohttp.WSMsgType.BINARY and struct.unpack_from(">I", message.data)[0] != TEXT_EVENT:
                run.previews.append(now - began)
            if message.type is not aiohttp.WSMsgType.TEXT:
                continue
            event = json.loads(message.data)
            kind, data = event["type"], event.get("data", {})
            if data.get("prompt_id") != prompt_id:
                continue
            if kind == "progress" and str(data["node"]) == node:
                run.progress.append((now - began, data["value"]))
                on_progress(data["value"])
                if cancel_at is not None and cancelling is None and data["value"] >= cancel_at:
                    cancelling = asyncio.create_task(_press_cancel(session, url))
            elif kind == "progress":
                on_load(data["value"], data["max"])
            elif kind == "executing" and data.get("node") is not None:
                run.started.setdefault(str(data["node"]), now - began)
            elif kind == "execution_error":
                raise BenchError(f"the prompt failed: {data.get('exception_message', '').strip()}")
            elif kind == "execution_interrupted" or (kind == "executing" and data.get("node") is None):
                end, run.ended_s = kind, now - began
                break
        pressed = None if cancelling is None else await cancelling
        if end == "executing":
            run.outputs = await _outputs(session, url, prompt_id)
            run.shown = "\n".join(run.outputs.get(node, {}).get("text", []))
        elif end and pressed is not None:
            run.cancel_ms = (began + run.ended_s - pressed) * 1e3
        else:
            raise BenchError("somebody else cancelled the prompt" if end else "rank 0 closed the connection before the prompt was done")
    return run


async def _why_refused(session: Any, url: str, graph: Graph, answer: str) -> str:
    """A ComfyUI of 2024 answers a graph with a node that it does not have by an error of its own, without a word about the node."""
    refused = f"rank 0 refused the graph: {answer[:500]}"
    async with session.get(f"{url}/object_info") as known:
        nodes = await known.json() if known.status == 200 else None
    missing = [] if nodes is None else sorted({value["class_type"] for value in graph.values()} - set(nodes))
    if not missing:
        return refused
    if missing[0].startswith("HunyuanImage3"):
        return f"rank 0 has no node {missing[0]}: its ComfyUI did not load the pack, and its log says why; {refused}"
    return f"this ComfyUI has no node {missing[0]}, which the graph needs; set COMFYUI_DIR to one of version 0.3.64 or newer; {refused}"


async def _press_cancel(session: Any, url: str) -> float:
    """When it was pressed."""
    pressed = time.perf_counter()
    async with session.post(f"{url}/interrupt") as answer:
        answer.raise_for_status()
    return pressed


async def _outputs(session: Any, url: str, prompt_id: str) -> dict[str, Any]:
    """The history is written a moment after the last message."""
    deadline = time.monotonic() + HISTORY_S
    while time.monotonic() < deadline:
        async with session.get(f"{url}/history/{prompt_id}") as answer:
            history = await answer.json()
        if prompt_id in history:
            return history[prompt_id]["outputs"]
        await asyncio.sleep(0.1)
    raise BenchError("rank 0 finished the prompt but keeps no history of it")
