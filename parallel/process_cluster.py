"""The one cluster of a ComfyUI process, made when it is first asked for."""

from __future__ import annotations

import os
import threading

import torch

from .cluster import Cluster
from .environment import LaunchEnvironment

_process_lock = threading.Lock()
_process_cluster: Cluster | None = None


def process_cluster(device: torch.device) -> Cluster:
    """The cluster of this process, made at the first call. ``device`` counts only when our launcher did not start us."""
    global _process_cluster
    with _process_lock:
        if _process_cluster is None:
            environment = LaunchEnvironment.from_environ(os.environ)
            _process_cluster = Cluster.from_environment(environment) if environment else Cluster.alone(device)
        return _process_cluster
