"""One rank of test_fault_matrix.py: the real driver, follower, guard and engine with a small checkpoint, without a ComfyUI around them.

Rank 0's prompt passes through every phase. The other ranks treat POST /prompt as ComfyUI does.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from aiohttp import web

sys.path.append(str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parents[1] / "parallel"))

from injector import install
from rank_pool import serve

from phase_parallel.models.hunyuan_image_3.config import HunyuanImage3Config
from phase_parallel.models.hunyuan_image_3.operations import MODEL
from phase_parallel.models.hunyuan_image_3.sequence import build_image_rows
from phase_parallel.models.hunyuan_image_3.tokenizer import HunyuanTokenizer
from phase_parallel.nodes import fan_out
from phase_parallel.nodes.driver import Driver
from phase_parallel.nodes.follower import follow_session
from phase_parallel.nodes.guard import secret_guard
from phase_parallel.parallel.cluster import Cluster
from phase_parallel.parallel.environment import LaunchEnvironment
from phase_parallel.parallel.plan import make_plan
from phase_parallel.parallel.section import digest_of

environment = LaunchEnvironment.from_environ(os.environ)
assert environment is not None
torch.set_num_threads(1)
FOLDER = Path(os.environ["TEST_CHECKPOINT"])
cluster = Cluster.from_environment(environment)
RANK = cluster.rank
fan_out._START_PATIENCE_S = 1.0
install(lambda name: importlib.import_module(f"phase_parallel.{name}"), Path(os.environ["TEST_ORDERS"]), RANK)
PLAN = make_plan("hybrid", world_size=cluster.world_size, rank=RANK)
SIZE = 256


class Interrupted(BaseException):
    pass


class FakeHost:
    interruption = Interrupted

    def __init__(self) -> None:
        self.prompt: str | None = None
        self.cancelled: Callable[[], bool] = lambda: False

    def running_prompt(self) -> str | None:
        return self.prompt

    def clear_cancel(self) -> None:
        self.cancelled = lambda: False


host = FakeHost()
driver = Driver(cluster, host, environment)
prompts: Queue[int] = Queue()


def call(op: str, node_id: str, args: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Any:
    engine = {"folder": str(FOLDER)}
    return driver.call(f"{MODEL}.{op}", {"engine": engine, **args}, tensors, node_id=node_id, plan=PLAN)


def prompt(prompt_id: str, seed: int = 3, cancel_in: str = "") -> dict[str, str]:
    """Load, text, two steps, a corner of the picture. Returns the digest of each result. ``cancel_in``: press cancel in that phase."""
    host.prompt = prompt_id
    if cancel_in:
        host.cancelled = lambda: cluster.record.where()[0] == cancel_in
    config = HunyuanImage3Config.from_folder(FOLDER)
    tokenizer = HunyuanTokenizer.from_folder(FOLDER, config)
    text = {
        "prompt": "a cat", "system_prompt": None, "cot_text": None, "task": "auto", "image_size": f"{SIZE}x{SIZE}", "max_new_tokens": 24,
        "seed": seed, "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0,
    }  # fmt: skip
    try:
        written, _ = call("generate_text", "1", text)
        rows = build_image_rows(tokenizer, config, prompt="a cat", system_prompt=None, cot_text=written["cot_text"], cond_images=(), height=SIZE, width=SIZE)
        _, latents = call("sample", "2", picture(rows, seed))
        # A row for each rank: what a rank without one computes is not used, and a fault there harms nobody.
        corner = latents["latents"][..., : cluster.world_size, :2].contiguous()
        _, pixels = call("vae_decode", "3", {}, {"latents": corner})
    finally:
        host.prompt = None
    written.pop("measured")
    return {"text": digest_of(written, {}), "latent": digest_of({}, latents), "pixels": digest_of({}, pixels)}


def picture(rows: Any, seed: int) -> dict[str, Any]:
    return {
        "cond": rows.cond.to_json(), "uncond": rows.uncond.to_json(), "height": rows.height, "width": rows.width, "ratio_index": rows.ratio_index,
        "steps": 2, "guidance": 2.5, "flow_shift": 3.0, "seeds": [seed],
    }  # fmt: skip


def unload() -> None:
    driver.call(f"{MODEL}.unload", {}, {}, node_id="4")


def error_since(moment: float) -> str:
    """What a section of this rank ended with after ``moment``, empty when all went well."""
    record = cluster.record.to_json()
    return record["error"] if record["error_at"] is not None and record["error_at"] > moment else ""


def execute() -> None:
    """A worker's executor thread."""
    while True:
        session = prompts.get()
        try:
            follow_session(cluster, session)
        except RuntimeError as error:
            print(f"rank {RANK}: {error}", file=sys.stderr)


async def post_prompt(request: web.Request) -> web.Response:
    (node,) = (await request.json())["prompt"].values()
    prompts.put(node["inputs"]["session"])
    return web.json_response({"prompt_id": "own"})


async def run_server() -> None:
    app = web.Application(middlewares=[secret_guard(environment)])
    app.add_routes([web.post("/prompt", post_prompt)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", environment.port).start()
    await asyncio.sleep(1e9)


if __name__ == "__main__":
    if RANK != 0:
        threading.Thread(target=execute, daemon=True).start()
        threading.Thread(target=lambda: asyncio.run(run_server()), daemon=True).start()
    serve({scenario.__name__: scenario for scenario in (prompt, unload, error_since)})
