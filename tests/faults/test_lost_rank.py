"""A rank of a real ComfyUI launch is killed while prompts wait: its user reads why, all ranks come back, and the queue goes on."""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_cell import Cell
from graph_runs import graph_of, node_of
from server_client import Graph

from phase_parallel.launch.http_json import Refused, get_json
from phase_parallel.launch.running import Launch

pytestmark = [pytest.mark.host, pytest.mark.ranks4, pytest.mark.timeout(1800)]
LIMIT_S = 15.0
BACK_S = 300.0
"""Starting four ComfyUI processes on a busy machine."""

RANKS = (0, 1, 3) if os.environ.get("FAULTS") == "all" else (0, 3)


class Killed:
    """A launch with the injector in its ranks."""

    def __init__(self, launch: Launch, orders: Path) -> None:
        self.launch, self.orders = launch, orders

    def post(self, graph: Graph) -> str:
        return get_json(self.launch.url + "/prompt", body={"prompt": graph})["prompt_id"]

    def history(self, prompt_id: str, limit_s: float) -> dict[str, Any]:
        """Of a prompt that is over, whether the ranks are there already or not."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            try:
                found = get_json(f"{self.launch.url}/history/{prompt_id}", timeout=2.0)
            except (OSError, Refused):
                found = {}
            if found:
                return found[prompt_id]
            time.sleep(0.1)
        raise AssertionError(f"prompt {prompt_id} did not end within {limit_s} s\n{self.launch.last_lines(60)}")

    def order(self, kind: str, phase: str, rank: int, at: int = 1) -> None:
        self.orders.write_text(json.dumps({"id": uuid.uuid4().hex, "rank": rank, "phase": phase, "at": at, "kind": kind, "weight": ""}))


def ask(seed: int) -> Graph:
    changes = {"question": "a cat", "seed": seed, "do_sample": "sample", "max_new_tokens": 24}
    graph = graph_of("image_question", "small-instruct", {"HunyuanImage3Ask": changes})
    del graph["2"], graph["3"]["inputs"]["image1"]
    return graph


def answer(history: dict[str, Any]) -> str:
    (text,) = history["outputs"][node_of(ask(0), "HunyuanImage3Ask")]["text"]
    return text.rpartition("\n")[0]


def error_of(history: dict[str, Any]) -> str:
    return next(data["exception_message"].strip() for kind, data in history["status"]["messages"] if kind == "execution_error")


@pytest.fixture(scope="module")
def killed(small_instruct: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    orders = tmp_path_factory.mktemp("orders") / "orders.json"
    search = [str(Path(__file__).parent / "preload"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "COMFYUI_DIR": os.environ.get("COMFYUI_DIR", ""),
        "PYTHONPATH": os.pathsep.join(search),
        "TEST_ORDERS": str(orders),
    }
    with Launch(ranks=4, models=[small_instruct], environment=environment, restarts=len(RANKS), timeout_s=900.0) as launch:
        yield Killed(launch, orders)


def test_a_full_disk_at_save(killed: Killed, cells: list[Cell]) -> None:
    """Only rank 0 writes, and what it says is ComfyUI's own; the queue goes on, and the picture is saved once there is room."""
    cell = Cell("disk full", "save", 0)
    cells.append(cell)
    graph = ask(60) | {
        "8": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": 0}},
        "9": {"class_type": "SaveImage", "inputs": {"images": ["8", 0], "filename_prefix": "full"}},
    }
    killed.order("disk full", "save", 0, at=0)
    start = time.monotonic()
    cell.sentence = error_of(killed.history(killed.post(graph), 60.0))
    cell.seconds = time.monotonic() - start
    killed.orders.unlink()
    after = killed.history(killed.post(graph), 60.0)
    cell.next_prompt = "saved" if after["outputs"]["9"]["images"] else "WRONG"
    assert "No space left on device" in cell.sentence
    assert after["outputs"]["9"]["images"]


@pytest.mark.parametrize("rank", RANKS)
def test_the_queue_goes_on_after_a_rank_was_killed(killed: Killed, cells: list[Cell], rank: int) -> None:
    cell = Cell("SIGKILL", "ComfyUI", rank)
    cells.append(cell)
    seed = 70 + rank  # what was asked before is answered from ComfyUI's cache
    expected = answer(killed.history(killed.post(ask(seed)), 120.0))
    killed.order("SIGKILL", "AR decode", rank)
    start = time.monotonic()
    broken, waiting, last = (killed.post(ask(number)) for number in (100 + rank, 80 + rank, seed))
    cell.sentence = error_of(killed.history(broken, LIMIT_S if rank else BACK_S))
    cell.seconds = time.monotonic() - start
    killed.orders.unlink()
    # Put back in their order, and done.
    second, third = killed.history(waiting, BACK_S), killed.history(last, 60.0)
    cell.next_prompt = "identical" if answer(third) == expected else "WRONG"
    assert answer(third) == expected and answer(second)
    if rank:
        assert cell.sentence.startswith(f"rank {rank} failed in AR decode (") and cell.sentence.endswith("the process has ended")
    else:
        assert cell.sentence.startswith("a rank was lost while this prompt ran")
    assert f"Rank {rank} was killed by SIGKILL: all ranks are started again." in killed.launch.log


HANG_TIMEOUT_S = 12.0


def test_the_queue_goes_on_after_a_rank_hung_for_ever(small_instruct: Path, cells: list[Cell]) -> None:
    """Stopped and never continued: its user reads so after the timeout, then the launcher ends it and all ranks come back."""
    cell = Cell("SIGSTOP for ever", "ComfyUI", 2)
    cells.append(cell)
    environment = {"COMFYUI_DIR": os.environ.get("COMFYUI_DIR", ""), "PHASE_PARALLEL_TIMEOUT_S": f"{HANG_TIMEOUT_S:g}"}
    with Launch(ranks=4, models=[small_instruct], environment=environment, restarts=1, timeout_s=900.0) as launch:
        user = Killed(launch, Path())
        expected = answer(user.history(user.post(ask(5)), 120.0))
        pid = launch.record.ranks[2].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        start = time.monotonic()
        broken, waiting, last = (user.post(ask(number)) for number in (6, 7, 5))
        cell.sentence = error_of(user.history(broken, HANG_TIMEOUT_S + LIMIT_S))
        cell.seconds = time.monotonic() - start
        assert answer(user.history(waiting, BACK_S))
        third = user.history(last, 60.0)
        cell.next_prompt = "identical" if answer(third) == expected else "WRONG"
        assert answer(third) == expected
        assert cell.sentence.startswith("rank 2 d") and cell.sentence.endswith("starts all ranks again, and what waits in the queue is kept")
        assert f"Rank 2 did not answer for {HANG_TIMEOUT_S:g} s: its process {pid} is ended." in launch.log
        assert "Rank 2 was killed by SIGKILL: all ranks are started again." in launch.log
