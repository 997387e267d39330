"""What all of ``phase-parallel bench node`` does alike: a folder without weights, a whole launch with ComfyUI, and what is kept of it."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

from ..models.hunyuan_image_3.synthetic import SyntheticSpec
from ..parallel.environment import RANDOM_WEIGHTS
from .environment import describe_machine
from .errors import BenchError
from .release import Release, write_release

FOLDER = "random-weights-80B-sizes"
# A rank that died is found, and its last lines are passed on, within this time.
CAUSE_S = 2.0
LIMIT_S = 900.0


class RunningRanks(Protocol):
    url: str

    def last_lines(self, count: int) -> str: ...


StartLaunch = Callable[..., AbstractContextManager[RunningRanks]]
EqualDigests = Callable[[str], Sequence[str]]
"""Of the address of rank 0: the digests of every rank's last result, which it waits to be equal."""
Use = Callable[[str, Release], Awaitable[dict[str, Any]]]


class LaunchOptions(Protocol):
    """``scheme``: the loader's plan."""

    scheme: str
    ranks: int
    device: str
    layers: int
    small: bool
    compare: Path | None


def read_compared(file: Path, bench: str, rows: str) -> dict[str, Any]:
    """The result of ``bench`` in ``file``, with its ``rows``. Raises BenchError when it is none."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if {"ranks", "layers", "alone", "commit", rows} <= set(values):
            return values
    except (OSError, ValueError, TypeError) as error:
        raise BenchError(f"{file} cannot be read as a result of {bench}: {error}; give --compare a file of `phase-parallel {bench} --out FILE`") from error
    raise BenchError(f"{file} is no result of {bench}; give --compare a file of `phase-parallel {bench} --out FILE`")


def measure_in_launch(
    options: LaunchOptions,
    spec: SyntheticSpec,
    launch: StartLaunch,
    equal_digests: EqualDigests,
    use: Use,
    *,
    flags: Sequence[str] = (),
    restarts: int = 0,
) -> dict[str, Any]:
    """What ``use`` measures at the address of rank 0, with the machine, the settings and the ranks' digests. ``flags`` are ComfyUI's; so often are ranks
    that fail started again.

    Raises BenchError, and what ``launch`` and ``equal_digests`` raise.
    """
    with tempfile.TemporaryDirectory(prefix="phase-parallel-bench-") as parent:
        built = write_release(Path(parent) / FOLDER, spec)
        environment = {RANDOM_WEIGHTS: "allowed", "COMFYUI_DIR": os.environ.get("COMFYUI_DIR", "")}
        print(f"Starting {options.ranks} ranks on {options.device} ...", flush=True)
        with launch(
            ranks=options.ranks,
            device=options.device,
            models=[Path(parent) / FOLDER],
            comfy_flags=flags,
            environment=environment,
            restarts=restarts,
            announce=print,
        ) as running:
            try:
                figures = asyncio.run(use(running.url, built))
                figures["digests"] = list(equal_digests(running.url))
            except BenchError as error:
                time.sleep(CAUSE_S)
                raise BenchError(f"{error}\nThe last lines of the ranks:\n{running.last_lines(30)}") from error
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    setting = {name: value for name, value in asdict(options).items() if name != "compare"}
    return {**describe_machine(device), **setting, **figures}


def print_load() -> Callable[[int, int], None]:
    """Shows every tenth of a load."""
    told = [-1]

    def on_load(done: int, total: int) -> None:
        tenth = 10 * done // max(total, 1)
        if tenth != told[0]:
            told[0] = tenth
            print(f"   {10 * tenth} %", flush=True)

    return on_load


def percent(value: float, of: float) -> str:
    return f"{100 * (value / of - 1):+.1f} %"
