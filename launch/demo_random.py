"""The demo with a small random checkpoint: one image from one request, which shows the ranks at work and draws nothing that means something."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import sys
import time
from pathlib import Path

from .demo_client import Graph, connected_to, run_prompt, saved_images, wait_for_equal_digests
from .demo_progress import DemoProgress
from .errors import LaunchError
from .paths import PACK_ROOT, STATE_FOLDER
from .running import Launch
from .status import table

WORKFLOW = PACK_ROOT / "workflows" / "api" / "t2i_generate.api.json"
CHECKPOINT_NAME = "HunyuanImage-3.0-small-random"


def random_demo(device: str, output: Path, *, ranks: int) -> None:
    """Raises LaunchError when no image is saved or the ranks do not agree on it."""
    began = time.monotonic()
    checkpoint = small_checkpoint(STATE_FOLDER / "demo_checkpoints")
    graph = prepare_graph(json.loads(WORKFLOW.read_text()), checkpoint.name)
    print(f"Starting {ranks} ranks on {device} ...", flush=True)
    with Launch(ranks=ranks, device=device, models=[checkpoint], announce=print) as launch:
        ready = time.monotonic()
        print(f"Sending {WORKFLOW.relative_to(PACK_ROOT)} to rank 0, once.", flush=True)
        progress = DemoProgress(sys.stdout)
        try:
            with connected_to(launch.url):
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


def save_images(url: str, history: dict, output: Path) -> list[Path]:
    """Fetch what rank 0 saved, beside earlier results."""
    images = saved_images(url, history)
    output.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d_%H%M%S")
    saved = []
    for number, content in enumerate(images):
        saved.append(output / f"{stamp}_{number}.png")
        saved[-1].write_bytes(content)
    return saved


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
