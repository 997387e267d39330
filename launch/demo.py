"""`phase-parallel demo`: one image on four ranks, from one request to rank 0, small random checkpoint."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from .demo_progress import DemoProgress
from .errors import LaunchError
from .http_json import Refused, get_bytes, get_json
from .paths import PACK_ROOT, STATE_FOLDER
from .readiness import STATUS_ROUTE
from .running import Launch
from .status import table
from .up import choose_device

WORKFLOW = PACK_ROOT / "workflows" / "api" / "t2i_generate.api.json"
CHECKPOINT_NAME = "HunyuanImage-3.0-small-random"
RANKS = 4
STATUS_EVERY_S = 0.1
# 2 cores need about a minute; a machine that is busy with other things gets time to finish.
LIMIT_S = 1800.0
# Other ranks publish their status once a second.
DIGEST_WAIT_S = 10.0

Graph = dict[str, dict[str, Any]]


def demo(*, device: str, output: Path) -> int:
    """Returns 0 when the image is saved and all ranks agree on it. Raises LaunchError otherwise."""
    began = time.monotonic()
    device, _ = choose_device(device, RANKS)
    checkpoint = small_checkpoint(STATE_FOLDER / "demo_checkpoints")
    graph = prepare_graph(json.loads(WORKFLOW.read_text()), checkpoint.name)
    print(f"Starting {RANKS} ranks on {device} ...", flush=True)
    with Launch(ranks=RANKS, device=device, models=[checkpoint], announce=print) as launch:
        ready = time.monotonic()
        print(f"Sending {WORKFLOW.relative_to(PACK_ROOT)} to rank 0, once.", flush=True)
        progress = DemoProgress(sys.stdout)
        try:
            history = asyncio.run(run_prompt(launch.url, graph, progress))
            saved = save_images(launch.url, history, output)
            digests = wait_for_equal_digests(launch.url)
        except LaunchError as error:
            raise LaunchError(f"{error}\nThe last lines of the ranks:\n{launch.last_lines(30)}") from error
        finished = time.monotonic()
    print()
    phases = {
        "start of the ranks": ready - began,
        **progress.seconds,
        "everything else": finished - ready - sum(progress.seconds.values()),
        "all in all": finished - began,
    }
    print(table(("phase", "seconds"), [(name, f"{seconds:.2f}") for name, seconds in phases.items()]))
    print()
    print(table(("rank", "digest of its result"), [(str(rank), text) for rank, text in enumerate(digests)]))
    print()
    for file in saved:
        print(f"Saved {file} (with its workflow inside).")
    print("All ranks agree; no process, port or temporary file is left.")
    return 0


def small_checkpoint(folder: Path) -> Path:
    """The demo's checkpoint, written once; written again when the code that makes it has changed."""
    from ..models.hunyuan_image_3.synthetic import SyntheticSpec, write_checkpoint

    spec = SyntheticSpec()
    digest = hashlib.sha256(repr(spec).encode())
    for source in sorted((PACK_ROOT / "models" / "hunyuan_image_3").glob("synthetic*.py")):
        digest.update(source.read_bytes())
    made = folder / digest.hexdigest()[:16]
    target = made / CHECKPOINT_NAME
    if target.is_dir():
        return target
    print("Writing a small random checkpoint in the official folder format (once) ...", flush=True)
    unfinished = folder / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write_checkpoint(unfinished / CHECKPOINT_NAME, spec)
    unfinished.rename(made)
    return target


def prepare_graph(graph: Graph, checkpoint: str) -> Graph:
    """The API-format workflow with its loader pointed at `checkpoint`.

    Raises LaunchError when it does not have exactly one loader.
    """
    loaders = [node for node in graph.values() if "folder" in node["inputs"]]
    if len(loaders) != 1:
        raise LaunchError(
            f"{WORKFLOW.name} has {len(loaders)} nodes with a checkpoint folder; the demo needs one."
        )
    loaders[0]["inputs"]["folder"] = checkpoint
    return graph


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


def save_images(url: str, history: dict[str, Any], output: Path) -> list[Path]:
    """Fetch what rank 0 saved, byte for byte (the workflow is inside), beside earlier results."""
    images = [image for node in history["outputs"].values() for image in node.get("images", [])]
    images = [image for image in images if image["type"] == "output"]
    if not images:
        raise LaunchError("The prompt ended without a saved image.")
    output.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d_%H%M%S")
    saved = []
    for number, image in enumerate(images):
        query = urlencode({key: image[key] for key in ("filename", "subfolder", "type")})
        file = output / f"{stamp}_{number}.png"
        file.write_bytes(get_bytes(f"{url}/view?{query}"))
        saved.append(file)
    return saved


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
