"""ComfyUI's "unload models" and "free memory" take the weights of all ranks; the next prompt loads them again."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from graph_runs import User, graph_of

from phase_parallel.launch.http_json import get_bytes, get_json

pytestmark = [pytest.mark.host, pytest.mark.ranks4, pytest.mark.timeout(1800)]

WEIGHTS = 30 << 20
"""At least so much of ``heavy`` is on each rank."""


def records(user: User) -> list[dict[str, Any]]:
    return get_json(user.launch.url + "/phase_parallel/status")["ranks"]


def models(user: User) -> list[str]:
    return [record["model"] for record in records(user)]


def memory(user: User) -> np.ndarray:
    return np.array([record["memory"]["resident_set"] for record in records(user)])


def press(user: User, **flags: bool) -> None:
    """The button; returns when no rank has a model any more."""
    get_bytes(user.launch.url + "/free", body=flags)
    deadline = time.monotonic() + 20.0
    while any(models(user)):
        assert time.monotonic() < deadline, f"{models(user)}\n{user.launch.last_lines(40)}"
        time.sleep(0.1)
    time.sleep(2.0)  # the records, with their memory, are written once a second


def ask(seed: int) -> dict[str, Any]:
    """Text alone: the small autoencoder of a test checkpoint takes longer than all the rest."""
    graph = graph_of("image_question", "heavy", {"HunyuanImage3Ask": {"question": "a cat", "seed": seed, "do_sample": "sample", "max_new_tokens": 12}})
    del graph["2"], graph["3"]["inputs"]["image1"]
    return graph


def answer(user: User, seed: int) -> tuple[str, list[str]]:
    """The text without the line about speed, and which nodes did nothing."""
    graph = ask(seed)
    run = user.run(graph)
    return user.shown(graph, run, "HunyuanImage3Ask").rpartition("\n")[0], run.cached


def test_unload_frees_all_ranks_and_the_next_prompt_loads_again(user: User) -> None:
    first, _ = answer(user, 3)
    assert models(user) == ["heavy"] * 4
    time.sleep(1.5)
    before = memory(user)
    press(user, unload_models=True, free_memory=True)
    freed = before - memory(user)
    assert (freed > WEIGHTS).all(), f"freed {freed / 1e6} MB of {before / 1e6}"
    # ComfyUI has forgotten its results too, so all of it is done again.
    assert answer(user, 3) == (first, [])
    assert models(user) == ["heavy"] * 4
    # The loader's results stay this time: the operation that needs the weights loads them.
    press(user, unload_models=True)
    press(user, unload_models=True)
    _, cached = answer(user, 4)
    assert cached == ["HunyuanImage3Loader"] and models(user) == ["heavy"] * 4
