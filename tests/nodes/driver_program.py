"""One rank of test_driver.py: the real driver, follower, guard and HTTP fan-out, without a ComfyUI around
them.

Rank 0 drives toy operations. The other ranks run a small server that treats POST /prompt as ComfyUI does: it
answers at once, and an executor thread works the prompts off one after another.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from aiohttp import web

sys.path.append(str(Path(__file__).resolve().parents[1] / "parallel"))

from rank_pool import serve

from phase_parallel.nodes import fan_out
from phase_parallel.nodes.driver import Driver
from phase_parallel.nodes.fan_out import FOLLOWER_ID
from phase_parallel.nodes.follower import follow_session
from phase_parallel.nodes.guard import secret_guard
from phase_parallel.parallel import operations
from phase_parallel.parallel.cluster import Cluster
from phase_parallel.parallel.environment import LaunchEnvironment
from phase_parallel.parallel.operations import OperationContext, Tensors, register

environment = LaunchEnvironment.from_environ(os.environ)
assert environment is not None
cluster = Cluster.from_environment(environment)
RANK = cluster.rank
fan_out._START_PATIENCE_S = 1.0


class Interrupted(BaseException):
    """As in ComfyUI 0.26, where the interruption is no Exception."""


class FakeHost:
    interruption = Interrupted

    def __init__(self) -> None:
        self.prompt: str | None = None
        self.wants_cancel = False

    def running_prompt(self) -> str | None:
        return self.prompt

    def cancelled(self) -> bool:
        return self.wants_cancel

    def clear_cancel(self) -> None:
        self.wants_cancel = False


host = FakeHost()
driver = Driver(cluster, host, environment)
mode = "follow"
followed: list[Any] = []
prompts: Queue[int] = Queue()


@register("toy.sum")
def toy_sum(
    context: OperationContext, args: dict[str, Any], tensors: Tensors
) -> tuple[dict[str, Any], Tensors]:
    """Adds up ``tensors["x"]`` once per step. ``args`` names the rank that makes a mistake."""
    total = torch.zeros_like(tensors["x"])
    for step in range(args.get("steps", 2)):
        context.section.check(step, args.get("steps", 2))
        context.section.report({"step": step})
        if args.get("fails") == RANK:
            raise ValueError("the toy operation broke")
        total = total + context.section.communicator.broadcast(tensors["x"].clone(), f"step{step}")
    if args.get("odd_result") == RANK:
        total = total + 1
    return {"name": args.get("name", ""), "measured": {"rank": RANK}}, {"total": total}


if RANK != 3:

    @register("toy.missing")
    def toy_missing(
        context: OperationContext, args: dict[str, Any], tensors: Tensors
    ) -> tuple[dict[str, Any], Tensors]:
        """A rank that runs another version of the pack."""
        return {}, {}


def prompt(
    prompt_id: str | None,
    calls: list[dict[str, Any]],
    cancel_at: int | None = None,
    hook_raises_at: int | None = None,
    keep_running: bool = False,
) -> list[Any]:
    """What rank 0's executor does with a graph of ``calls``."""
    host.prompt = prompt_id

    def report(event: dict[str, Any]) -> None:
        if event["step"] == cancel_at:
            host.wants_cancel = True
        if event["step"] == hook_raises_at:
            raise Interrupted

    results = []
    try:
        for call in calls:
            inputs = {"x": torch.tensor([1, 2, 3]), "y": torch.ones(2, dtype=torch.bfloat16)}
            result, tensors = driver.call(call.pop("op", "toy.sum"), call, inputs, node_id="5", report=report)
            results.append([result, {name: tensor.tolist() for name, tensor in tensors.items()}])
    finally:
        if not keep_running:
            host.prompt = None
    return results


def cancel_while_joining(prompt_id: str) -> list[Any]:
    threading.Timer(0.5, lambda: setattr(host, "wants_cancel", True)).start()
    return prompt(prompt_id, [{}])


def behave(how: str, who: list[int]) -> None:
    """How the workers among ``who`` treat the next prompts."""
    global mode
    mode = how if RANK in who else "follow"


def tamper(rank: int | None) -> None:
    """From now on ``rank`` receives another last token than rank 0 has sent."""

    def receive(*arguments: Any) -> Tensors:
        received = original(*arguments)
        if rank == RANK:
            received["x"][-1] += 1
        return received

    operations._receive = receive if rank is not None else original


original = operations._receive


def history() -> list[Any]:
    """(session, sections) that this rank has followed to the end, once no follower runs."""
    deadline = time.monotonic() + 10.0
    while prompts.unfinished_tasks and time.monotonic() < deadline:
        time.sleep(0.02)
    return followed


def left_keys() -> list[str]:
    """What the sessions before the last one have left in the store."""
    kinds = [*(f"joined/{rank}" for rank in range(4)), *(f"call/{index}" for index in range(5))]
    names = [f"session/{session}/{kind}" for session in range(driver._sessions) for kind in kinds]
    return [name for name in names if cluster.store.find(name) is not None]


def execute() -> None:
    """The worker's executor thread."""
    while True:
        session = prompts.get()
        try:
            followed.append([session, follow_session(cluster, session)])
        except RuntimeError as error:
            followed.append([session, str(error)])
        finally:
            prompts.task_done()


async def post_prompt(request: web.Request) -> web.Response:
    if mode == "refuse":
        return web.json_response({"error": {"message": "the prompt is not valid"}}, status=400)
    graph = (await request.json())["prompt"]
    (node,) = graph.values()
    assert node["class_type"] == FOLLOWER_ID
    if mode != "accept only":
        prompts.put(node["inputs"]["session"])
    return web.json_response({"prompt_id": "own"})


async def run_server() -> None:
    app = web.Application(middlewares=[secret_guard(environment)])
    app.add_routes([web.post("/prompt", post_prompt)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", environment.port).start()
    while True:
        await asyncio.sleep(3600)


if __name__ == "__main__":
    if RANK != 0:
        threading.Thread(target=execute, daemon=True).start()
        threading.Thread(target=lambda: asyncio.run(run_server()), daemon=True).start()
    scenarios = [prompt, cancel_while_joining, behave, tamper, history, left_keys]
    serve({scenario.__name__: scenario for scenario in scenarios})
