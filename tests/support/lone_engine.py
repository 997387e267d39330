"""A checkpoint as the nodes see it, with the real driver and the real engine, in a world of one process without ComfyUI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from phase_parallel.nodes.driver import Driver
from phase_parallel.nodes.engine_handle import EngineChoice, EngineHandle
from phase_parallel.nodes.progress import NodeProgress
from phase_parallel.parallel.cluster import Cluster
from phase_parallel.parallel.plan import make_plan


class QuietHost:
    """Nobody cancels and no prompt runs."""

    interruption = KeyboardInterrupt

    def running_prompt(self) -> str | None:
        return None

    def cancelled(self) -> bool:
        return False

    def clear_cancel(self) -> None: ...


class RecordingHandle(EngineHandle):
    """Also keeps what was asked: (operation, arguments, JSON result)."""

    def __init__(self, choice: EngineChoice, calls: Driver) -> None:
        super().__init__(choice, calls)
        self.made: list[tuple[str, dict[str, Any], dict[str, Any]]] = []

    def call(self, op: str, args: dict[str, Any], tensors: Any, **options: Any) -> Any:
        result, outputs = super().call(op, args, tensors, **options)
        self.made.append((op, args, result))
        return result, outputs

    def results(self, op: str) -> list[dict[str, Any]]:
        return [result for name, _, result in self.made if name == op]


class Events(NodeProgress):
    """What a node would show, kept instead."""

    def __init__(self) -> None:
        super().__init__(None)
        self.seen: list[dict[str, Any]] = []

    def __call__(self, event: dict[str, Any]) -> None:
        self.seen.append(event)

    def texts(self, kind: str) -> list[str]:
        return [event["text"] for event in self.seen if event["kind"] == kind]


def lone_engine(folder: Path, *, kernels: str = "auto") -> RecordingHandle:
    """A handle of its own for each test; the engine behind it is shared by handles of one folder until another folder is used."""
    driver = Driver(Cluster.alone(torch.device("cpu")), QuietHost(), None)
    choice = EngineChoice(str(folder), make_plan("single", world_size=1), "auto", "micro_major", "multi_micro", kernels)
    return RecordingHandle(choice, driver)
