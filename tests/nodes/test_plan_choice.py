"""What the loader's `auto` means in a launch that was started with `up --plan`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phase_parallel.nodes import plan_choice
from phase_parallel.parallel.cluster import Cluster
from phase_parallel.parallel.environment import LaunchEnvironment
from phase_parallel.parallel.plan import PlanError
from phase_parallel.parallel.store import JsonStore

SECRET = "0123456789abcdef"
LAUNCH = LaunchEnvironment(0, 4, 0, "127.0.0.1", 1, SECRET, "id", (1, 2, 3, 4), 60.0, "cpu", (), 0)


def cluster_of(environment: LaunchEnvironment, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(JsonStore, "tcp", lambda *address: JsonStore.in_process())
    monkeypatch.setattr(Cluster, "start", lambda cluster: None)
    return Cluster.from_environment(environment)


@pytest.mark.parametrize(
    ("asked", "loader", "chosen"),
    [
        (None, "auto", ("hybrid", "hybrid: ")),
        ("tp", "auto", ("tp", "tp: chosen at start")),
        ("tp", "hybrid", ("hybrid", "hybrid: chosen in the loader")),
        ("replicated", "auto", ("replicated", "replicated: chosen at start")),
    ],
)
def test_the_launch_decides_what_auto_means(
    eight_ways: Path, monkeypatch: pytest.MonkeyPatch, asked: str | None, loader: str, chosen: tuple[str, str]
) -> None:
    cluster = cluster_of(replace(LAUNCH, plan=asked), monkeypatch)
    assert cluster.device == torch.device("cpu")
    plan, reason = plan_choice.choose(
        cluster, folder=str(eight_ways), name=loader, denoise="auto", attention="auto", weight_dtype="auto"
    )
    assert plan.name == chosen[0] and reason.startswith(chosen[1])
    assert cluster.plan.name == (asked or "hybrid"), "the groups of the first section are those of the plan"


def test_several_machines_keep_tensor_parallelism_inside_each(eight_ways: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = cluster_of(replace(LAUNCH, machine_ranks=2), monkeypatch)
    choices = {"folder": str(eight_ways), "denoise": "auto", "attention": "auto", "weight_dtype": "auto"}
    plan, reason = plan_choice.choose(cluster, name="auto", **choices)
    assert plan.describe() == "replicated: AR TP2 on each of 2 replicas · denoise TP2×SP2 (ulysses)" and cluster.plan == plan
    assert reason == "replicated: tensor parallelism stays inside each of 2 machines"
    with pytest.raises(PlanError, match="plan hybrid adds up the layers of prefill over ranks 0, 1, 2, 3, which are on 2 machines"):
        plan_choice.choose(cluster, name="hybrid", **choices)
