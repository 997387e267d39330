"""Many short prompts in a row on a real ComfyUI with four ranks: mixed, cancelled, broken. Nothing is lost, nothing leaks.

``SOAK=500`` sets how many (``make soak``), ``SEED`` repeats a run. A plain test run makes 50 without faults: the caches' part.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from graph_runs import graph_of, node_of
from server_client import Graph

from phase_parallel.launch.http_json import Refused, get_bytes, get_json
from phase_parallel.launch.running import Launch

pytestmark = [pytest.mark.host, pytest.mark.ranks4, pytest.mark.timeout(7200)]
COUNT = int(os.environ.get("SOAK", "50"))
FAULTS = COUNT > 50
SEED = int(os.environ.get("SEED", str(random.SystemRandom().randrange(10**6))))
WARM = min(20, COUNT // 2)
"""Prompts before the first measurement: libraries and caches fill."""

GROWTH = 30 << 20
"""Bytes that a process may grow by from the first measurement to the last."""

QUESTIONS = {"small-instruct": ("a cat", "a red house"), "small-distil": ("a dog",)}


@dataclass(frozen=True)
class Usage:
    resident: int
    files: int
    threads: int


def usage(pid: int) -> Usage:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Usage(int(status["VmRSS"].split()[0]) * 1024, len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]))


def what_is_wrong(kind: str, order: dict[str, Any], history: dict[str, Any]) -> str:
    """With the end of a prompt that is no success: a cancelled one may be interrupted, one with a fault must name it, no other may fail."""
    messages = history["status"]["messages"]
    failed = [data["exception_message"].strip() for name, data in messages if name == "execution_error"]
    if kind == "cancel" and not failed and any(name == "execution_interrupted" for name, _ in messages):
        return ""
    if kind == "fault" and len(failed) == 1 and re.fullmatch(rf"rank {order['rank']} failed in {order['phase']}( \([^\n]*\))?: [^\n]+", failed[0]):
        return ""
    return f"it ended with {failed or [name for name, _ in messages]}, ordered was {order or 'nothing'}"


class Soak:
    """The launch, and what each question was answered the first time."""

    def __init__(self, launch: Launch, orders: Path) -> None:
        self.launch, self.orders = launch, orders
        self.random = random.Random(SEED)
        self.answers: dict[str, str] = {}
        self.said: dict[str, int] = {}
        self.last: Graph | None = None
        """The prompt before, where ComfyUI has its result."""

    def graph(self) -> Graph:
        # Another checkpoint now and then: it is loaded in place of the first, which takes ten times as long as a question.
        folder = "small-distil" if self.random.random() < 0.06 else "small-instruct"
        changes = {
            "question": self.random.choice(QUESTIONS[folder]), "seed": self.random.randrange(4), "do_sample": "sample",
            "max_new_tokens": self.random.choice((8, 16)),
            "top_k": self.random.randrange(1000, 2000),  # more than the vocabulary has: another question to the cache, the same to the model
        }  # fmt: skip
        graph = graph_of("image_question", folder, {"HunyuanImage3Ask": changes})
        del graph["2"], graph["3"]["inputs"]["image1"]
        return graph

    def one(self, kind: str) -> None:
        graph = self.last if kind == "again" and self.last else self.graph()
        if kind == "invalid":
            del graph["3"]["inputs"]["clip"]
            with pytest.raises(Refused):
                self.post(graph)
            return
        order: dict[str, Any] = {}
        if kind == "fault":
            order = {"id": uuid.uuid4().hex, "rank": self.random.randrange(4), "phase": self.random.choice(("AR prefill", "AR decode")), "at": 0}
            self.orders.write_text(json.dumps(order | {"kind": self.random.choice(("exception", "out of memory", "NaN")), "weight": "layers.1.o_proj"}))
        prompt_id = self.post(graph)
        if kind == "cancel":
            time.sleep(self.random.random() * 0.4)
            get_bytes(self.launch.url + "/interrupt", body={})
        if kind == "delete":
            second = self.post(self.graph())
            get_bytes(self.launch.url + "/queue", body={"delete": [second]})
        if kind == "unload":
            get_bytes(self.launch.url + "/free", body={"unload_models": True})
        history = self.history(prompt_id)
        status = history["status"]["status_str"]
        self.said[f"{kind}: {status}"] = self.said.get(f"{kind}: {status}", 0) + 1
        if status != "success":
            wrong = what_is_wrong(kind, order, history)
            assert not wrong, f"{kind}: {wrong}; SEED={SEED}\n{self.launch.last_lines(60)}"
        if kind == "again" and self.last:
            cached = next(data["nodes"] for name, data in history["status"]["messages"] if name == "execution_cached")
            assert set(cached) == set(graph), "an identical prompt does nothing"
        elif status == "success":
            self.compare(graph, history)
        self.last = graph if status == "success" and kind in ("plain", "again") else None
        self.orders.unlink(missing_ok=True)

    def compare(self, graph: Graph, history: dict[str, Any]) -> None:
        node = node_of(graph, "HunyuanImage3Ask")
        (text,) = history["outputs"][node]["text"]
        inputs = {name: value for name, value in graph[node]["inputs"].items() if name != "top_k"}
        question = json.dumps([graph[node_of(graph, "HunyuanImage3Loader")]["inputs"]["folder"], inputs], sort_keys=True)
        said = text.rpartition("\n")[0]
        assert self.answers.setdefault(question, said) == said, "the same question has another answer"

    def post(self, graph: Graph) -> str:
        return get_json(self.launch.url + "/prompt", body={"prompt": graph})["prompt_id"]

    def history(self, prompt_id: str) -> dict[str, Any]:
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            found = get_json(f"{self.launch.url}/history/{prompt_id}")
            if found:
                return found[prompt_id]
            time.sleep(0.02)
        raise AssertionError(f"prompt {prompt_id} did not end; SEED={SEED}\n{self.launch.last_lines(60)}")

    def usages(self) -> list[Usage]:
        ranks = get_json(self.launch.url + "/phase_parallel/status")["ranks"]
        assert len({rank["digest"] for rank in ranks}) == 1
        return [usage(rank["pid"]) for rank in ranks]


@pytest.fixture
def soak(small_instruct: Path, small_distil: Path, tmp_path: Path) -> Iterator[Soak]:
    preload = str(Path(__file__).resolve().parents[1] / "faults" / "preload")
    environment = {
        "COMFYUI_DIR": os.environ.get("COMFYUI_DIR", ""),
        "PYTHONPATH": os.pathsep.join([preload, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TEST_ORDERS": str(tmp_path / "orders.json"),
        # Freed weights go back to the system, or their places would look like growth.
        "MALLOC_MMAP_THRESHOLD_": str(1 << 18),
    }
    with Launch(ranks=4, models=[small_instruct, small_distil], environment=environment, timeout_s=900.0) as launch:
        yield Soak(launch, tmp_path / "orders.json")


def ended(*messages: tuple[str, str]) -> dict[str, Any]:
    return {"status": {"messages": [(name, {"exception_message": message}) for name, message in messages]}}


def test_what_counts_as_a_right_end() -> None:
    order = {"rank": 2, "phase": "AR decode"}
    interrupted, other = ended(("execution_interrupted", "")), ended(("execution_error", "rank 2 does not take part\n"))
    for message in ("rank 2 failed in AR decode: NaN\n", "rank 2 failed in AR decode (token 3 of 8): out of memory\n"):
        fault = ended(("execution_start", ""), ("execution_error", message))
        assert not what_is_wrong("fault", order, fault)
        assert all(what_is_wrong(kind, {}, fault) for kind in ("cancel", "plain"))
    for message in ("rank 1 failed in AR decode: NaN", "rank 2 failed in AR prefill: NaN", "rank 2 failed in AR decode: NaN\nand a trace"):
        assert what_is_wrong("fault", order, ended(("execution_error", message)))
    assert not what_is_wrong("cancel", {}, interrupted)
    assert all(what_is_wrong(kind, order, interrupted) for kind in ("fault", "plain"))
    assert what_is_wrong("cancel", {}, other) and what_is_wrong("fault", order, other)


def test_many_prompts(soak: Soak) -> None:
    print(f"SEED={SEED}")
    kinds = ["plain"] * 9 + ["again"] * 3 + ["cancel"] * 4 + ["invalid", "delete", "unload"] + ["fault"] * (3 if FAULTS else 0)
    first: list[Usage] = []
    for number in range(COUNT):
        if number == WARM:
            first = soak.usages()
        soak.one(soak.random.choice(kinds))
    soak.one("plain")
    last = soak.usages()
    for rank, (before, after) in enumerate(zip(first, last, strict=True)):
        print(f"rank {rank}: {before} -> {after}")
    print(soak.said)
    for rank, (before, after) in enumerate(zip(first, last, strict=True)):
        assert after.resident - before.resident < GROWTH, f"rank {rank}: {before} -> {after}; SEED={SEED}"
        assert after.files - before.files <= 8, f"rank {rank}: {before} -> {after}; SEED={SEED}"
        assert after.threads - before.threads <= 4, f"rank {rank}: {before} -> {after}; SEED={SEED}"
