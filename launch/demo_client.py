"""What the demo does at rank 0's page, as a person would: post a graph and follow it, give pictures, fetch what was saved."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode

from .demo_progress import DemoProgress
from .errors import LaunchError
from .http_json import Refused, get_bytes, get_json
from .readiness import STATUS_ROUTE

STATUS_EVERY_S = 0.1
# 2 cores need about a minute; a machine that is busy with other things gets time to finish.
LIMIT_S = 1800.0
# Other ranks publish their status once a second.
DIGEST_WAIT_S = 10.0

Graph = dict[str, dict[str, Any]]


@contextmanager
def connected_to(url: str) -> Iterator[None]:
    """Raises LaunchError for a connection to rank 0 that breaks, whatever was asked through it."""
    import aiohttp  # comes with every ComfyUI

    try:
        yield
    except (aiohttp.ClientError, URLError, ConnectionError, TimeoutError) as error:
        raise LaunchError(f"Rank 0 at {url} does not answer any more ({error}).") from error


async def run_prompt(url: str, graph: Graph, progress: DemoProgress) -> dict[str, Any]:
    """Post the graph once and follow it to its end. Returns its history entry.

    Raises LaunchError when it is refused, fails or takes too long.
    """
    import aiohttp  # comes with every ComfyUI

    client = uuid.uuid4().hex
    socket_url = f"{url.replace('http', 'ws', 1)}/ws?{urlencode({'clientId': client})}"
    async with aiohttp.ClientSession() as session, session.ws_connect(socket_url, max_msg_size=0) as socket:
        try:
            answer = await asyncio.to_thread(
                get_json, f"{url}/prompt", body={"prompt": graph, "client_id": client}
            )
        except Refused as refusal:
            raise LaunchError(f"Rank 0 refused the workflow: {refusal.body}") from refusal
        prompt_id = answer["prompt_id"]
        watching = asyncio.create_task(watch_status(url, progress))
        try:
            await asyncio.wait_for(wait_for_end(socket, prompt_id, graph), LIMIT_S)
        except TimeoutError:
            raise LaunchError(f"The prompt was not finished after {LIMIT_S / 60:.0f} minutes.") from None
        finally:
            watching.cancel()
    progress.look(await asyncio.to_thread(get_json, url + STATUS_ROUTE))
    progress.end()
    # The history entry is written a moment after the last message.
    for _ in range(50):
        history = await asyncio.to_thread(get_json, f"{url}/history/{prompt_id}")
        if prompt_id in history:
            return history[prompt_id]
        await asyncio.sleep(0.1)
    raise LaunchError("Rank 0 finished the prompt but keeps no history of it.")


async def wait_for_end(socket: Any, prompt_id: str, graph: Graph) -> None:
    """Read rank 0's messages until the prompt is done.

    Raises LaunchError when the prompt fails or rank 0 is gone.
    """
    async for message in socket:
        if message.type.name != "TEXT":
            continue  # a live preview picture
        event = json.loads(message.data)
        data = event.get("data", {})
        if data.get("prompt_id") != prompt_id:
            continue
        if event["type"] in ("execution_error", "execution_interrupted"):
            node = graph.get(str(data.get("node_id")), {}).get("class_type", "a node")
            raise LaunchError(f"{node} failed: {data.get('exception_message', 'interrupted').strip()}")
        if event["type"] == "executing" and data.get("node") is None:
            return
    raise LaunchError("Rank 0 closed the connection before the prompt was done.")


async def watch_status(url: str, progress: DemoProgress) -> None:
    while True:
        # The websocket tells, with a reason, when rank 0 is gone.
        with suppress(OSError, Refused):
            progress.look(await asyncio.to_thread(get_json, url + STATUS_ROUTE))
        await asyncio.sleep(STATUS_EVERY_S)


def saved_images(url: str, history: dict[str, Any]) -> list[bytes]:
    """The files that rank 0 saved, byte for byte (the workflow is inside). Raises LaunchError when there is none."""
    images = [image for node in history["outputs"].values() for image in node.get("images", [])]
    images = [image for image in images if image["type"] == "output"]
    if not images:
        raise LaunchError("The prompt ended without a saved image.")
    return [get_bytes(f"{url}/view?{urlencode({key: image[key] for key in ('filename', 'subfolder', 'type')})}") for image in images]


def upload_image(url: str, name: str, content: bytes) -> None:
    """Put a picture into rank 0's input folder, as its page does, in place of one of that name. Raises LaunchError when it is refused."""
    asyncio.run(_upload(url, name, content))


async def _upload(url: str, name: str, content: bytes) -> None:
    import aiohttp  # comes with every ComfyUI

    form = aiohttp.FormData()
    form.add_field("image", content, filename=name, content_type="image/png")
    form.add_field("overwrite", "true")
    async with aiohttp.ClientSession() as session, session.post(f"{url}/upload/image", data=form) as answer:
        if answer.status != 200:
            raise LaunchError(f"Rank 0 took no picture for an input: it answered {answer.status} to {name}; see its log.")


def has_stock_sampling(url: str) -> bool:
    """Whether this ComfyUI can sample flow models with its own nodes, and so run all graphs of the pack."""
    return "ModelSamplingSD3" in get_json(f"{url}/object_info", timeout=60.0)


def wait_for_equal_digests(url: str) -> list[str]:
    """The digest of every rank's last result. Raises LaunchError when they stay different."""
    deadline = time.monotonic() + DIGEST_WAIT_S
    while True:
        reports = get_json(url + STATUS_ROUTE)["ranks"]
        digests = [report["digest"] if report else "" for report in reports]
        if digests[0] and len(set(digests)) == 1:
            return digests
        if time.monotonic() > deadline:
            raise LaunchError(f"The ranks do not agree on the result: {', '.join(digests)}.")
        time.sleep(STATUS_EVERY_S)
