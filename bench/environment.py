"""What a figure must name: hardware, versions, commit and date."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]


def describe_machine(device: torch.device) -> dict[str, str]:
    """Plain strings for the head of a result file. ``commit`` is empty outside of a git checkout."""
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "hardware": hardware,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else "",
        "triton": version_of("triton"),
        "flashinfer": version_of("flashinfer-python"),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
    }


def version_of(distribution: str) -> str:
    """Empty where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def commit() -> str:
    """Short commit of the pack, with a + when files differ from it."""
    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    name = git("rev-parse", "--short", "HEAD")
    return name + "+" if name and git("status", "--porcelain", "--untracked-files=no") else name
