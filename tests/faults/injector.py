"""Makes one rank fail at one place of a real run. Test code alone: nothing of it is in the pack, and a rank has it only when a test loads it.

``install`` wraps what every phase passes through, the section's ``check``. The order to fail lies in a file, so that a test can give it to ranks
that run already: {"id", "rank", "phase", "at", "kind"}; ``at`` counts the phase's checks. Each order is carried out once.
"""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image

PHASES = ("load", "AR prefill", "AR decode", "denoise", "VAE decode")
KINDS = ("exception", "out of memory", "NaN", "SIGSTOP", "file removed", "SIGKILL")


class Injector:
    """``resident()`` gives the weights of this rank, or those that are being loaded; ``folder`` is the checkpoint."""

    def __init__(self, orders: Path, rank: int, resident: Callable[[], dict[str, torch.Tensor]]) -> None:
        self._orders = orders
        self._rank = rank
        self._resident = resident
        self._done: set[str] = set()
        self._phase, self._count = "", 0

    def reached(self, phase: str) -> None:
        """Called at every check of every phase."""
        self._count = self._count + 1 if phase == self._phase else 0
        self._phase = phase
        if not self._orders.is_file():
            return
        order = json.loads(self._orders.read_text())
        due = order["rank"] == self._rank and order["phase"] == phase and order["at"] <= self._count
        if due and order["id"] not in self._done:
            self._done.add(order["id"])
            self._fail(order)

    def _fail(self, order: dict[str, Any]) -> None:
        kind = order["kind"]
        if kind == "exception":
            raise ValueError("the test broke this rank")
        if kind == "out of memory":
            torch.empty(1 << 50, device=next(iter(self._resident().values())).device)
        if kind == "NaN":
            for name, tensor in self._resident().items():
                if order["weight"] in name:
                    tensor.fill_(float("nan"))
        if kind == "disk full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if kind == "SIGSTOP":
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "file removed":
            for file in Path(order["folder"]).glob("*.safetensors"):
                file.unlink(missing_ok=True)


def install(package: Any, orders: Path, rank: int) -> None:
    """``package(name)`` returns a module of the pack, under whatever name it was imported."""
    section = package("parallel.section")
    slot = package("models.hunyuan_image_3.operations")._slot
    checkpoint = package("parallel.checkpoint")
    loading: dict[str, torch.Tensor] = {}

    def resident() -> dict[str, torch.Tensor]:
        return loading or slot._engine.model.resident

    injector = Injector(orders, rank, resident)
    original_check, original_load = section.Section.check, checkpoint.Checkpoint.load

    def check(self: Any, done: int, total: int) -> None:
        original_check(self, done, total)
        injector.reached(self._cluster.record.where()[0])

    def load(self: Any, table: Any, tensors: dict[str, torch.Tensor], **options: Any) -> None:
        loading.update(tensors)
        try:
            original_load(self, table, tensors, **options)
        finally:
            loading.clear()

    def save(self: Any, *arguments: Any, **options: Any) -> None:
        injector.reached("save")
        original_save(self, *arguments, **options)

    original_save = Image.Image.save
    Image.Image.save = save
    section.Section.check = check
    checkpoint.Checkpoint.load = load
