"""``phase-parallel bench faults``: a rank of a real launch with ComfyUI is killed while it writes and while it draws; how long until its user reads why,
until all ranks are back, and until the next prompt is done, with the same result as before.

The model is small and random, so these are the times of finding a fault and starting again, and not of loading 80B weights.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .ar import TASKS, Task, prompt_text
from .errors import BenchError
from .node import text_graph
from .node_client import Graph, run_graph
from .node_launch import LIMIT_S, EqualDigests, StartLaunch, measure_in_launch
from .node_picture import picture_graph
from .release import SMALL, Release
from .report import print_head, rank_words

STATUS_ROUTE = "/phase_parallel/status"
PHASES = ("AR decode", "denoise")
# With few token ids, one that ends the text would come soon.
SPEC = replace(SMALL, vocab=16384)
SHORT = {"AR decode": 32, "denoise": 4}
LONG = {"AR decode": 8192, "denoise": 200}
"""Tokens or steps of a run that ends well, and of the one in which a rank is killed."""
KILL_AT = {"AR decode": 8, "denoise": 2}
ATTEMPTS = 5
POLL_S = 0.1
BACK_S = 300.0


@dataclass(frozen=True)
class FaultOptions:
    """``scheme``: the loader's plan."""

    scheme: str
    ranks: int
    device: str
    layers: int
    small: bool
    compare: Path | None = None


@dataclass(frozen=True)
class Prompt:
    """A graph whose ``node`` writes or draws; ``length`` is the input that says how much."""

    graph: Graph
    node: str
    length: str

    def of(self, amount: int, seed: int) -> Graph:
        self.graph[self.node]["inputs"] |= {self.length: amount, "seed": seed}
        return self.graph


def measure(options: FaultOptions, launch: StartLaunch, equal_digests: EqualDigests) -> dict[str, Any]:
    """Raises BenchError, and what ``launch`` and ``equal_digests`` raise."""
    task = replace(TASKS[0], tokens=TASKS[0].tokens // 8)
    spec = replace(SPEC, layers=options.layers)

    async def use(url: str, built: Release) -> dict[str, Any]:
        rows = []
        for number, phase in enumerate(PHASES):
            rank = max(1, options.ranks - 1 - number)  # rank 0 can tell its user nothing when it is killed
            rows.append(await kill_and_recover(url, prompt_of(phase, built, task, options), phase, rank, equal_digests))
            print(row_words(rows[-1]), flush=True)
        return {"rows": rows}

    found = measure_in_launch(options, spec, launch, equal_digests, use, restarts=len(PHASES))
    return {**found, "alone": False, "collectives": "NCCL" if options.device == "cuda" else "gloo"}


def prompt_of(phase: str, built: Release, task: Task, options: FaultOptions) -> Prompt:
    if phase == "AR decode":
        return Prompt(*text_graph(prompt_text(built, task), options), "max_new_tokens")
    picture = picture_graph(built, task, options)
    return Prompt(picture.graph, picture.sampler, "steps")


async def kill_and_recover(url: str, prompt: Prompt, phase: str, rank: int, equal_digests: EqualDigests) -> dict[str, Any]:
    """A prompt that goes well; the same one longer, in which ``rank`` is killed; and the first again, when the ranks are back."""
    await run_graph(url, prompt.of(SHORT[phase], 1), prompt.node, limit_s=LIMIT_S)
    expected = (await asyncio.to_thread(equal_digests, url))[0]
    pids = rank_pids(url)
    killed, said = await _killed_run(url, prompt, phase, pids[rank])
    told = time.perf_counter()
    await asyncio.to_thread(wait_for_new_ranks, url, pids)
    back = time.perf_counter()
    await run_graph(url, prompt.of(SHORT[phase], 1), prompt.node, limit_s=LIMIT_S)
    done = time.perf_counter()
    digest = (await asyncio.to_thread(equal_digests, url))[0]
    return {
        "phase": phase,
        "rank": rank,
        "sentence": said,
        "told_s": told - killed,
        "back_s": back - killed,
        "next_prompt_s": done - back,
        "all_s": done - killed,
        "same_result": digest == expected,
    }


async def _killed_run(url: str, prompt: Prompt, phase: str, pid: int) -> tuple[float, str]:
    """When the rank was killed, and what its user read. Random weights end a text now and then before that; another seed is tried then."""
    for attempt in range(ATTEMPTS):
        killed: list[float] = []
        try:
            await run_graph(url, prompt.of(LONG[phase], 100 + attempt), prompt.node, on_progress=_killer(pid, KILL_AT[phase], killed), limit_s=LIMIT_S)
        except BenchError as error:
            if not killed:
                raise
            return killed[0], str(error).removeprefix("the prompt failed: ")
        if killed:
            raise BenchError(f"the prompt went on to its end although a rank was killed in {phase}")
    raise BenchError(f"{ATTEMPTS} prompts ended before a rank could be killed in {phase}")


def _killer(pid: int, at: int, killed: list[float]) -> Callable[[int], None]:
    def on_progress(count: int) -> None:
        if count >= at and not killed:
            killed.append(time.perf_counter())
            os.kill(pid, signal.SIGKILL)

    return on_progress


def read_status(url: str) -> list[dict[str, Any] | None]:
    with urllib.request.urlopen(url + STATUS_ROUTE, timeout=2.0) as answer:
        return json.load(answer)["ranks"]


def _status_if_any(url: str, ranks: int) -> list[dict[str, Any] | None]:
    """Between its end and its start rank 0 does not answer."""
    try:
        return read_status(url)
    except (OSError, ValueError):
        return [None] * ranks


def rank_pids(url: str) -> list[int]:
    """Raises BenchError when a rank is silent."""
    records = read_status(url)
    if any(record is None for record in records):
        raise BenchError("a rank tells nothing of itself, so it cannot be killed")
    return [record["pid"] for record in records if record is not None]


def wait_for_new_ranks(url: str, old: list[int]) -> None:
    """Until rank 0 answers and every rank is another process than before. Raises BenchError after :data:`BACK_S`."""
    deadline = time.monotonic() + BACK_S
    while time.monotonic() < deadline:
        if all(record is not None and record["pid"] not in old for record in _status_if_any(url, len(old))):
            return
        time.sleep(POLL_S)
    raise BenchError(f"the ranks were not back {BACK_S:.0f} s after one was killed")


def row_words(row: dict[str, Any]) -> str:
    same = "the same result as before" if row["same_result"] else "ANOTHER result than before"
    return (
        f"{row['phase']:9} rank {row['rank']} killed: told after {row['told_s']:.2f} s, all ranks back after {row['back_s']:.2f} s, the next prompt in "
        f"{row['next_prompt_s']:.2f} s with {same}\n      {row['sentence']}"
    )


def print_result(result: dict[str, Any]) -> None:
    print_head(f"killed ranks, {result['scheme']}, {rank_words(result)}, {result['collectives']}, small random model", result)
    for row in result["rows"]:
        print(row_words(row))


def require_recovery(result: dict[str, Any]) -> None:
    """Raises BenchError when a prompt behind a fault made something else."""
    for row in result["rows"]:
        if not row["same_result"]:
            raise BenchError(f"after rank {row['rank']} was killed in {row['phase']} the next prompt had another result than before it.")
