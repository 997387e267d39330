"""A user of rank 0: posts a graph once, listens to what the browser would hear, fetches what was saved."""

from __future__ import annotations

import asyncio
import io
import json
import struct
import uuid
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import aiohttp
import numpy as np
from PIL import Image

Graph = dict[str, dict[str, Any]]

TEXT_EVENT = 3
"""First number of a binary message that is text for a node; all others are preview pictures."""


@dataclass
class Run:
    """What one prompt did. `progress`: class of the node -> its (value, maximum) messages; `texts`: class of the node ->
    the texts that appeared on it, in order.
    """

    outputs: dict[str, Any] = field(default_factory=dict)
    progress: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    texts: dict[str, list[str]] = field(default_factory=dict)
    cached: list[str] = field(default_factory=list)
    previews: int = 0
    error: str | None = None

    def steps(self, node: str) -> int:
        """How far this class of node has reported to be."""
        return max((value for value, _ in self.progress.get(node, [])), default=0)

    def files(self, kind: str) -> list[dict[str, str]]:
        return [file for output in self.outputs.values() for file in output.get(kind, [])]


class Client:
    def __init__(self, url: str) -> None:
        self.url = url

    def run(self, graph: Graph, *, cancel_at: tuple[str, int] | None = None, limit_s: float = 900.0) -> Run:
        """Post and wait for the end. `cancel_at`: press cancel once this class of node has done that many
        steps.
        """
        return asyncio.run(asyncio.wait_for(self._run(graph, cancel_at), limit_s))

    def refusal(self, graph: Graph) -> str:
        """The server's answer to a graph that it must not accept."""
        return asyncio.run(self._refusal(graph))

    def picture(self, run: Run) -> tuple[np.ndarray, dict[str, Any]]:
        """The saved picture, uint8 [H, W, 3], and the graph inside it."""
        (file,) = run.files("images")
        with Image.open(io.BytesIO(asyncio.run(self._get(f"/view?{urlencode(file)}")))) as picture:
            return np.array(picture), json.loads(picture.info["prompt"])

    def node_names(self) -> set[str]:
        """Every node that this ComfyUI knows."""
        return set(json.loads(asyncio.run(self._get("/object_info"))))

    def upload(self, name: str, content: bytes) -> None:
        asyncio.run(self._upload(name, content))

    def page(self, path: str) -> str | None:
        """A page as text; None where the server has no such page."""
        return asyncio.run(self._page(path))

    async def _run(self, graph: Graph, cancel_at: tuple[str, int] | None) -> Run:
        run = Run()
        client = uuid.uuid4().hex
        socket_url = f"{self.url}/ws?{urlencode({'clientId': client})}"
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(socket_url, max_msg_size=0) as socket,
        ):
            body = {"prompt": graph, "client_id": client}
            async with session.post(f"{self.url}/prompt", json=body) as answer:
                content = await answer.json()
                assert answer.status == 200, content
            async for message in socket:
                if message.type is aiohttp.WSMsgType.BINARY:
                    _note_binary(message.data, graph, run)
                elif _note(json.loads(message.data), content["prompt_id"], graph, run):
                    break
                if cancel_at is not None and run.steps(cancel_at[0]) >= cancel_at[1]:
                    cancel_at = None
                    async with session.post(f"{self.url}/interrupt") as answer:
                        assert answer.status == 200
            for _ in range(100):  # the history is written a moment after the last message
                async with session.get(f"{self.url}/history/{content['prompt_id']}") as answer:
                    history = await answer.json()
                if history:
                    run.outputs = history[content["prompt_id"]]["outputs"]
                    return run
                await asyncio.sleep(0.1)
        raise AssertionError("the prompt left no history")

    async def _refusal(self, graph: Graph) -> str:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}/prompt", json={"prompt": graph}) as answer,
        ):
            assert answer.status == 400, await answer.text()
            return await answer.text()

    async def _page(self, path: str) -> str | None:
        async with aiohttp.ClientSession() as session, session.get(self.url + path) as answer:
            return await answer.text() if answer.status == 200 else None

    async def _get(self, path: str) -> bytes:
        async with aiohttp.ClientSession() as session, session.get(self.url + path) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.read()

    async def _upload(self, name: str, content: bytes) -> None:
        form = aiohttp.FormData()
        form.add_field("image", content, filename=name, content_type="image/png")
        form.add_field("overwrite", "true")
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}/upload/image", data=form) as answer,
        ):
            assert answer.status == 200, await answer.text()


def _note_binary(data: bytes, graph: Graph, run: Run) -> None:
    (kind,) = struct.unpack_from(">I", data)
    if kind != TEXT_EVENT:
        run.previews += 1
        return
    (length,) = struct.unpack_from(">I", data, 4)
    node, text = data[8 : 8 + length].decode(), data[8 + length :].decode()
    run.texts.setdefault(graph[node]["class_type"], []).append(text)


def _note(event: dict[str, Any], prompt_id: str, graph: Graph, run: Run) -> bool:
    """Write one message into `run`; True when it was the last one."""
    kind, data = event["type"], event.get("data", {})
    if data.get("prompt_id") != prompt_id:
        return False
    if kind == "progress":
        name = graph[data["node"]]["class_type"]
        run.progress.setdefault(name, []).append((data["value"], data["max"]))
    if kind == "execution_cached":
        run.cached = [graph[node]["class_type"] for node in data["nodes"]]
    if kind in ("execution_error", "execution_interrupted"):
        run.error = data.get("exception_message", "interrupted").strip()
        return True
    return kind == "executing" and data.get("node") is None
