"""One rank of test_collective_ranks.py: a toy layer in each phase, with one deliberate mistake on one rank or on all."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from rank_pool import serve

from phase_parallel.parallel.cluster import Cluster
from phase_parallel.parallel.collectives import PhaseView
from phase_parallel.parallel.plan import make_plan
from phase_parallel.parallel.resident import Weight, project
from phase_parallel.parallel.section import SectionKey, digest_of, open_section
from phase_parallel.parallel.store import JsonStore

RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
HOST, PORT = os.environ["STORE"].split(":")
TIMEOUT_S = 10.0
"""How soon a mistake stops all ranks is measured by the tests; this only bounds a hang, and a machine that pauses for some seconds must not look like one."""

cluster = Cluster(
    JsonStore.tcp(HOST, int(PORT), "collectives"), rank=RANK, world_size=WORLD_SIZE, device=torch.device("cpu"), timeout_s=TIMEOUT_S
)
cluster.start()
calls = 0
UP = Weight(torch.ones(8, 4), "column_parallel", "layers.3.mlp.up")
DOWN = Weight(torch.ones(4, 8), "row_parallel", "layers.3.mlp.down")
groups_made = 0


def count_groups() -> None:
    """From now on every new process group is counted."""
    real = dist.new_group

    def counted(*args: Any, **more: Any) -> Any:
        global groups_made
        groups_made += 1
        return real(*args, **more)

    dist.new_group = counted


def denoise(view: PhaseView, x: torch.Tensor, mistake: str) -> torch.Tensor:
    order = view.topology.sp_ranks
    with view.forward({"row_reduce": 1, "seq_gather": 1}, "toy"):
        hidden = project(x, UP.tensor if mistake == "untagged" else UP)
        product = project(hidden, DOWN)
        x = x + (product if mistake == "forgotten" else view.row_reduce(product))
        if mistake == "reduced twice":
            x = view.row_reduce(x)
        if mistake == "one more":
            x = view.row_reduce(project(hidden, DOWN))
        if mistake == "wrong phase":
            view.vocab_gather(x, "lm_head", order=view.topology.tp_ranks)
        if mistake != "one less":
            x = view.seq_gather(x, "final", order=order[::-1] if mistake == "reordered" else order)
    return x


def decode(view: PhaseView, x: torch.Tensor, mistake: str) -> torch.Tensor:
    order = tuple(range(WORLD_SIZE)) if mistake == "physical order" else view.topology.tp_ranks
    with view.forward({"vocab_gather": 1}, "head"):
        return view.vocab_gather(x + view.topology.tp_rank, "lm_head", order=order)


def layer(*, phase: str = "denoise", mistake: str = "", odd: list[int] | None = None) -> list[float]:
    """Two steps of the toy layer; ``mistake`` is made in the second one on ``odd`` ranks."""
    global calls
    calls += 1
    mine = mistake if odd is None or RANK in odd else ""
    given = [1, 2, 3 + int(mine == "one token")]
    plan = make_plan("hybrid", world_size=WORLD_SIZE, rank=RANK)
    with open_section(cluster, SectionKey("prompt", "7", calls, digest_of(given, {})), plan, phase=phase) as section:
        view = section.communicator.phase(phase)
        for step in range(2):
            section.check(step, 2)
            x = {"denoise": denoise, "decode": decode}[phase](view, torch.ones(2, 4), mine if step == 1 else "")
        section.check(2, 2)
        section.exit(digest_of({}, {"x": x}))
    return x.flatten().tolist()


def phases() -> dict[str, Any]:
    """Every phase twice, after all groups are there: how many groups that made, and whether the views stayed the same."""
    global calls
    layer()
    before = groups_made
    views = []
    for _ in range(2):
        for phase in ("decode", "denoise"):
            layer(phase=phase)
            communicator = cluster.communicator
            assert communicator is not None
            views.append([id(communicator.phase(name)) for name in ("prefill", "decode", "denoise")])
    return {"made": groups_made - before, "at start": before, "views": views}


if __name__ == "__main__":
    count_groups()
    serve({"layer": layer, "phases": phases})
