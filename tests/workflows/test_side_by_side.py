"""Two launches on one machine draw at the same time: each gets its own picture, and one goes on when the other is gone."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from graph_runs import GOLDEN, User, graph_of
from server_client import Graph

from phase_parallel.launch.http_json import get_json
from phase_parallel.launch.running import Launch

pytestmark = [pytest.mark.host, pytest.mark.ranks4, pytest.mark.timeout(1200)]


def graph(seed: int) -> Graph:
    inputs = {"prompt": "a cat", "task": "off", "size": "width x height", "width": 128, "height": 128, "steps": 3, "seed": seed}
    return graph_of("t2i_generate", "tiny-base", {"HunyuanImage3Generate": inputs})


def draw(user: User, seed: int) -> np.ndarray:
    return user.draw(graph(seed))[0]


def test_two_launches_draw_at_the_same_time() -> None:
    environment = {"COMFYUI_DIR": os.environ.get("COMFYUI_DIR", "")}
    options = {"ranks": 2, "models": [GOLDEN / "checkpoints"], "environment": environment, "timeout_s": 600.0}
    with Launch(**options, plan="replicated") as second:
        with Launch(**options) as first, ThreadPoolExecutor(2) as pool:
            users = [User(launch) for launch in (first, second)]
            rounds = [list(pool.map(draw, users, seeds)) for seeds in ((1, 2), (2, 1))]
            plans = [get_json(user.launch.url + "/phase_parallel/status")["plan"] for user in users]
        assert plans == ["tp: AR TP2 · denoise TP2", "replicated: AR TP1 on each of 2 replicas · denoise TP1×CFG2"]
        (one, two), (two_again, one_again) = rounds
        # Sums in another order may fall to the other side of a whole number of 255.
        assert np.abs(one.astype(int) - one_again).max() <= 1 and np.abs(two.astype(int) - two_again).max() <= 1
        assert np.abs(one.astype(int) - two).max() > 1, "pictures of different seeds"
        assert np.array_equal(draw(users[1], 2), two), "the other launch has ended, this one draws as before"
