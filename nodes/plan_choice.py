"""Rank 0's answer to the loader's "auto": which plan fits the running ranks and the memory they have."""

from __future__ import annotations

from typing import Any

import torch

from ..models.hunyuan_image_3.loading import DEVICE_HEADROOM, resolve_plan
from ..parallel.cluster import Cluster
from ..parallel.plan import ParallelPlan


def choose(cluster: Cluster, *, folder: str, **choices: str) -> tuple[ParallelPlan, str]:
    """The plan and the reason, one sentence. `choices`: name, denoise, attention, weight_dtype.

    Raises PlanError when a choice does not fit the ranks or their memory.
    """
    return resolve_plan(
        folder,
        world_size=cluster.world_size,
        free_bytes_per_rank=free_bytes_per_rank(cluster),
        at_start=cluster.asked_plan,
        machine_ranks=cluster.machine_ranks,
        **choices,
    )


def free_bytes_per_rank(cluster: Cluster) -> int:
    """Bytes the fullest rank could give to weights.

    What the loader keeps free beside the weights is taken off, so that a chosen plan also loads. What a
    rank's own torch holds counts as free: it is a resident engine, which another one replaces, and the same
    choice must come out the same when a graph runs again.
    """
    if cluster.device.type != "cuda":
        return _available_host_bytes() // cluster.machine_ranks
    free, _ = torch.cuda.mem_get_info(cluster.device)
    own = free + torch.cuda.memory_reserved(cluster.device)
    others = [_device_bytes(record) for record in cluster.records() if record is not None]
    return min([own, *(value for value in others if value is not None)]) - DEVICE_HEADROOM


def _device_bytes(record: dict[str, Any]) -> int | None:
    memory = record["memory"]
    return memory["device_free"] + memory["device_reserved"] if "device_free" in memory else None


def _available_host_bytes() -> int:
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024
