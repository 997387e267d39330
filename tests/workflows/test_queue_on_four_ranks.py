"""The queue of a real ComfyUI on four ranks: cancelled at once, reordered, thinned and cleared, and 50 mixed prompts in a row."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from graph_runs import User, graph_of, node_of
from server_client import Graph

from phase_parallel.launch.http_json import Refused, get_bytes, get_json

pytestmark = [pytest.mark.host, pytest.mark.ranks4, pytest.mark.timeout(1800)]
BASE = "tiny-base"
OVER_S = 60.0
KINDS = {"identical": 13, "prefix": 11, "seed": 6, "size": 2, "task": 3, "invalid": 6, "cancel": 8}
"""How often each comes in a row of 50 with the first: a picture takes the longest."""

SEED = int(os.environ.get("SEED", str(random.SystemRandom().randrange(10**6))))


def picture(seed: int, steps: int = 1) -> Graph:
    inputs = {"prompt": "a cat", "task": "off", "size": "width x height", "width": 128, "height": 128, "steps": steps, "seed": seed}
    return graph_of("t2i_generate", BASE, {"HunyuanImage3Generate": inputs})


def endless(seed: int) -> Graph:
    return picture(seed, steps=2000)


class Queue:
    def __init__(self, user: User) -> None:
        self.url = user.launch.url
        self.log = user.launch

    def post(self, graph: Graph, **extra: Any) -> str:
        return get_json(self.url + "/prompt", body={"prompt": graph, **extra})["prompt_id"]

    def order(self, path: str, **body: Any) -> None:
        get_bytes(f"{self.url}/{path}", body=body)

    def find(self, prompt_id: str) -> dict[str, Any] | None:
        return get_json(f"{self.url}/history/{prompt_id}").get(prompt_id)

    def wait(self, prompt_id: str, *, cancel: bool = False) -> dict[str, Any]:
        """History of a prompt that is over. ``cancel``: whoever sees it go on presses the button again, as ComfyUI itself forgets a cancel
        that comes before it has taken the prompt from its queue.
        """
        deadline = time.monotonic() + OVER_S
        while time.monotonic() < deadline:
            found = self.find(prompt_id)
            if found is not None:
                return found
            time.sleep(0.3)
            if cancel:
                self.order("interrupt")
        raise AssertionError(f"prompt {prompt_id} did not end within {OVER_S} s\n{self.log.last_lines(40)}")

    def wait_until_running(self, prompt_id: str) -> None:
        deadline = time.monotonic() + OVER_S
        while time.monotonic() < deadline:
            if any(entry[1] == prompt_id for entry in get_json(self.url + "/queue")["queue_running"]):
                return
            time.sleep(0.02)
        raise AssertionError(f"prompt {prompt_id} did not start")

    def waiting(self) -> list[str]:
        entries = get_json(self.url + "/queue")["queue_pending"]
        return [entry[1] for entry in sorted(entries, key=lambda entry: entry[0])]


@pytest.fixture
def queue(user: User) -> Queue:
    user.run(picture(0))  # loaded
    return Queue(user)


def interrupted(history: dict[str, Any]) -> bool:
    return any(kind == "execution_interrupted" for kind, _ in history["status"]["messages"])


def succeeded(history: dict[str, Any]) -> bool:
    return history["status"]["status_str"] == "success"


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.05])
def test_a_cancel_right_after_the_submit(queue: Queue, delay_s: float) -> None:
    prompt_id = queue.post(endless(1))
    time.sleep(delay_s)
    queue.order("interrupt")
    assert interrupted(queue.wait(prompt_id, cancel=True))
    assert succeeded(queue.wait(queue.post(picture(int(delay_s * 1000) + 10))))


def test_a_cancel_while_prompts_wait_ends_the_running_one_only(queue: Queue) -> None:
    first, second, third = queue.post(endless(2)), queue.post(picture(20)), queue.post(picture(21))
    queue.wait_until_running(first)
    queue.order("interrupt")
    assert interrupted(queue.wait(first))
    assert succeeded(queue.wait(second)) and succeeded(queue.wait(third))


def test_waiting_prompts_are_reordered_deleted_and_cleared(queue: Queue) -> None:
    running = queue.post(endless(3))
    queue.wait_until_running(running)
    late, gone = queue.post(picture(30)), queue.post(picture(31))
    early = queue.post(picture(32), front=True)
    assert queue.waiting() == [early, late, gone]
    queue.order("queue", delete=[gone])
    assert queue.waiting() == [early, late]
    queue.order("interrupt")
    assert interrupted(queue.wait(running))
    assert succeeded(queue.wait(late)) and succeeded(queue.wait(early))
    order = list(get_json(queue.url + "/history"))
    assert order.index(early) < order.index(late), "the one put in front was first"
    assert queue.find(gone) is None
    running = queue.post(endless(4))
    queue.wait_until_running(running)
    lost = [queue.post(picture(seed)) for seed in (40, 41)]
    queue.order("queue", clear=True)
    queue.order("interrupt")
    assert interrupted(queue.wait(running)) and queue.waiting() == []
    assert succeeded(queue.wait(queue.post(picture(42))))
    assert [queue.find(each) for each in lost] == [None, None]


class Mixed:
    """50 prompts of text and picture; each is compared with what the same prompt gave before."""

    def __init__(self, user: User, queue: Queue) -> None:
        self.user, self.queue = user, queue
        self.random = random.Random(SEED)
        self.pictures: dict[str, np.ndarray] = {}
        self.inputs: dict[str, Any] = {"text": "a cat", "seed": 0, "size": 128, "task": "auto ratio"}
        self.prefix = "mixed"

    def graph(self, **changes: Any) -> Graph:
        wanted = self.inputs | changes
        size = {"size": "width x height", "width": wanted["size"], "height": 128}
        rewrite = {"task": wanted["task"], "do_sample": "greedy", **size}
        sampler = {"steps": wanted.get("steps", 2), "seed": wanted["seed"]}
        named = {"PrimitiveStringMultiline": {"value": wanted["text"]}, "SaveImage": {"filename_prefix": self.prefix}}
        return graph_of("t2i_ksampler", BASE, {**named, "HunyuanImage3Rewrite": rewrite, "KSampler": sampler})

    def one(self, kind: str) -> None:
        if kind == "invalid":
            graph = self.graph()
            # Of a node that every output needs: ComfyUI runs those outputs that are valid.
            del graph[node_of(graph, "HunyuanImage3Loader")]["inputs"]["folder"]
            with pytest.raises(Refused):
                self.queue.post(graph)
            return
        if kind == "cancel":
            prompt_id = self.queue.post(self.graph(steps=2000, seed=self.random.randrange(1000, 2000)))
            time.sleep(self.random.random() * 0.3)
            self.queue.order("interrupt")
            assert interrupted(self.queue.wait(prompt_id, cancel=True))
            return
        if kind == "prefix":
            self.prefix = f"mixed{self.random.randrange(10**6)}"
        if kind == "seed":
            self.inputs["seed"] = self.random.choice([seed for seed in range(4) if seed != self.inputs["seed"]])
        if kind == "size":
            self.inputs["size"] = 272 - self.inputs["size"]
        if kind == "task":
            self.inputs["task"] = "off" if self.inputs["task"] == "auto ratio" else "auto ratio"
        self.draw(kind)

    def draw(self, kind: str) -> None:
        run = self.user.run(self.graph())
        if kind in ("identical", "prefix"):
            assert {"HunyuanImage3Rewrite", "HunyuanImage3Encode", "KSampler"} <= set(run.cached), f"{kind} samples nothing; SEED={SEED}"
        if kind == "seed":
            assert {"HunyuanImage3Loader", "HunyuanImage3Rewrite"} <= set(run.cached), f"the text is used again; SEED={SEED}"
            assert "KSampler" not in run.cached
        if kind != "identical":
            pixels, _ = self.user.client.picture(run)
            known = self.pictures.setdefault(repr(sorted(self.inputs.items())), pixels)
            assert np.array_equal(pixels, known), f"the same prompt draws another picture; SEED={SEED}"


@pytest.mark.usefixtures("needs_flow")
def test_mixed_prompts_in_a_row(user: User, queue: Queue) -> None:
    mixed = Mixed(user, queue)
    drawn = [kind for kind, count in KINDS.items() for _ in range(count)]
    mixed.random.shuffle(drawn)
    mixed.draw("first")
    before = ""
    for kind in drawn:
        # A cancel leaves ComfyUI without the last results of that prompt, so the next one may have to draw.
        mixed.one("plain" if kind in ("identical", "prefix", "seed") and before in ("cancel", "invalid") else kind)
        before = kind
        ranks = get_json(user.launch.url + "/phase_parallel/status")["ranks"]
        assert len({rank["digest"] for rank in ranks}) == 1, f"ranks differ after {kind}; SEED={SEED}"
    print(f"SEED={SEED}", Counter(drawn), f"{len(mixed.pictures)} pictures")
