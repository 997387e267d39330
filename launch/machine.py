"""Facts about this machine that matter to several ranks: devices, links between them, memory, disk,
versions.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .paths import STATE_FOLDER

# Named in `doctor`'s first lines; a bug report needs them.
PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "aiohttp")


@dataclass(frozen=True)
class Device:
    """One CUDA device; bytes."""

    name: str
    capability: tuple[int, int]
    total: int
    free: int


@dataclass(frozen=True)
class Machine:
    """What `doctor` judges. peers[i][j]: device i can read device j's memory. Bytes everywhere."""

    python: tuple[int, int]
    versions: dict[str, str | None]
    backends: frozenset[str]
    devices: tuple[Device, ...]
    peers: tuple[tuple[bool, ...], ...]
    topology: str
    memory_available: int
    shared_memory: int
    disk_free: dict[str, int]
    cores: int


def look_at_machine() -> Machine:
    """Collect the facts. Creates a CUDA context on each device (some hundred MB, for a moment)."""
    import torch
    import torch.distributed as dist

    count = torch.cuda.device_count()
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return Machine(
        python=sys.version_info[:2],
        versions={name: package_version(name) for name in PACKAGES},
        backends=frozenset(name for name, there in backends.items() if there),
        devices=tuple(_device(index) for index in range(count)),
        peers=tuple(
            tuple(i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count))
            for i in range(count)
        ),
        topology=_topology() if count > 1 else "",
        memory_available=_memory_available(),
        shared_memory=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0,
        disk_free={name: shutil.disk_usage(folder).free for name, folder in _disks().items()},
        cores=len(os.sched_getaffinity(0)),
    )


def package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device(index: int) -> Device:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    return Device(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index), total, free)


def _topology() -> str:
    """The matrix of links as nvidia-smi draws it; empty where it is not installed."""
    if shutil.which("nvidia-smi") is None:
        return ""
    done = subprocess.run(
        ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout if done.returncode == 0 else ""


def _memory_available() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _disks() -> dict[str, Path]:
    state = next(folder for folder in (STATE_FOLDER, *STATE_FOLDER.parents) if folder.is_dir())
    return {"this checkout": state, "temporary files": Path(os.environ.get("TMPDIR", "/tmp"))}
