"""``phase-parallel bench load``: a checkpoint in the official format on the local disk, loaded by all ranks through the pack's loader, against what the
disk gives to as many processes that only read.

The weights are one block of random numbers again and again, since a loader does not look at them. Each measurement says how much of it came from the
disk: cold files were dropped from the machine's memory, warm ones lie there from the load before.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from ..models.hunyuan_image_3.config import HunyuanImage3Config
from ..models.hunyuan_image_3.loading import LoadOptions, load_model
from ..models.hunyuan_image_3.synthetic import SyntheticSpec, weight_bytes, write_part, write_settings
from ..models.hunyuan_image_3.synthetic_weights import storage_dtype
from ..parallel.cluster import Cluster
from ..parallel.collectives import Communicator
from ..parallel.groups import ProcessGroups
from ..parallel.plan import ParallelPlan, make_plan
from ..parallel.rank_record import read_memory
from ..parallel.section import SectionKey, open_section
from .denoise_table import free_memory
from .disk import fetched, forget, probe, read_whole, reset_peak
from .environment import describe_machine
from .errors import BenchError
from .node_launch import print_load
from .release import RELEASE, SMALL, from_spec
from .report import print_head

SHARD_BYTES = 5_000_000_000
"""About that of the release's files."""
RESERVE_BYTES = 4 << 30
"""Of the disk, left to others."""
LONGEST_S = 300.0
"""For writing once, reading twice and loading from memory once, as a quick probe of the disk foretells it."""
POOL = 1 << 24


@dataclass(frozen=True)
class LoadRun:
    """``folder`` has the settings of a checkpoint of ``layers`` layers, and the ranks write its weights."""

    scheme: str
    ranks: int
    alone: bool
    layers: int
    small: bool
    folder: str


def spec_of(layers: int, *, small: bool) -> SyntheticSpec:
    return replace(SMALL, layers=layers) if small else replace(RELEASE, layers=layers, max_shard_bytes=SHARD_BYTES)


def checkpoint_bytes(layers: int, *, small: bool) -> int:
    spec = spec_of(layers, small=small)
    return sum(weight_bytes(from_spec(spec).config, spec).values())


def choose_layers(free: int, *, small: bool, gib: float | None, speeds: tuple[float, float] | None) -> tuple[int, str]:
    """As many layers as the disk, ``gib`` and :data:`LONGEST_S` at ``speeds`` (write, read) allow, and which of them decided; all of them if they can.

    Raises BenchError when not even one fits.
    """
    whole = SMALL.layers if small else RELEASE.layers
    limits = {"free space": float(free - RESERVE_BYTES)}
    if gib is not None:
        limits["--gib"] = gib * (1 << 30)
    if speeds is not None:
        limits["the disk's speed"] = LONGEST_S / (1 / speeds[0] + 3 / speeds[1])
    least = min(limits, key=lambda name: limits[name])
    one, two = (checkpoint_bytes(layers, small=small) for layers in (1, 2))
    layers = int((limits[least] - (one - (two - one))) // (two - one))
    if layers < 1:
        raise BenchError(
            f"a checkpoint of one layer has {one / 1e9:.1f} GB, and {least} allows {max(0.0, limits[least]) / 1e9:.1f} GB; give --folder on another disk."
        )
    return (whole, "whole") if layers >= whole else (layers, least)


def prepare(folder: Path, *, small: bool, gib: float | None) -> tuple[Path, int, str]:
    """Chooses the size and writes the settings: the checkpoint's folder, its layers, and what decided. Raises BenchError, SyntheticError."""
    speeds = None if small else probe(folder)
    layers, why = choose_layers(shutil.disk_usage(folder).free, small=small, gib=gib, speeds=speeds)
    checkpoint = folder / "checkpoint"
    write_settings(checkpoint, spec_of(layers, small=small))
    if why != "whole":
        print(f"{layers} layers, {checkpoint_bytes(layers, small=small) / 1e9:.1f} GB: {why} allows no more.", flush=True)
    return checkpoint, layers, why


class PooledNoise:
    """Tensors out of one block of random numbers, each beginning at a place of its own: as fast as a copy."""

    def __init__(self, dtype: str):
        self._dtype = dtype
        noise = torch.randn(POOL, generator=torch.Generator().manual_seed(0)) * 0.02
        self._pools = {kind: noise.to(kind) for kind in (torch.float32, torch.bfloat16)}

    def __call__(self, key: str, shape: tuple[int, ...]) -> torch.Tensor:
        pool = self._pools[storage_dtype(key, self._dtype)]
        start = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % len(pool)
        values = torch.empty(prod(shape), dtype=pool.dtype)
        done = 0
        while done < len(values):
            part = pool[start : start + len(values) - done]
            values[done : done + len(part)] = part
            done, start = done + len(part), 0
        return values.view(shape)


def run_alone(options: LoadRun, device: torch.device) -> dict[str, Any]:
    plan = make_plan("single", world_size=1)
    return _measure(options, plan, Communicator(plan, ProcessGroups(plan, {}, None, "alone")), device)


def run_rank(options: LoadRun, cluster: Cluster) -> dict[str, Any]:
    plan = make_plan(options.scheme, world_size=options.ranks, rank=cluster.rank)
    with open_section(cluster, SectionKey("bench", "load", 0, ""), plan, phase="bench") as section:
        result = _measure(options, plan, section.communicator, cluster.device)
        section.exit("")
    return result


def _measure(options: LoadRun, plan: ParallelPlan, comm: Communicator, device: torch.device) -> dict[str, Any]:
    folder, spec = Path(options.folder), spec_of(options.layers, small=options.small)
    config = HunyuanImage3Config.from_folder(folder)
    say = _first_rank_says(plan.rank)

    def write() -> int:
        written = write_part(folder, config, spec, PooledNoise(spec.dtype), part=plan.rank, parts=plan.world_size)
        forget(written)
        return sum(file.stat().st_size for file in written)

    say("Writing the checkpoint ...")
    writing = timed(write, comm)
    own = sorted(folder.glob("*.safetensors"))[plan.rank :: plan.world_size]
    say(f"Written {writing['bytes'] / 1e9:.2f} GB in {writing['seconds']:.1f} s. Reading it, nothing else ...")
    disk = timed(lambda: read_whole(own), comm)
    forget(own)
    loads = []
    for files in ("cold", "warm"):
        say(f"Read in {disk['seconds']:.1f} s. Loading it, files {files} ..." if files == "cold" else "Loading it once more ...")
        loads.append({"files": files, **_load(folder, plan, comm, device)})
        if plan.rank == 0:
            print(load_words(loads[-1], writing["bytes"]), file=sys.stderr, flush=True)
    about = {"scheme": plan.describe(), "ranks": plan.world_size, "alone": options.alone, "layers": options.layers}
    return {**describe_machine(device), **about, "checkpoint_bytes": writing["bytes"], "writing": writing, "disk": disk, "loads": loads}


def _load(folder: Path, plan: ParallelPlan, comm: Communicator, device: torch.device) -> dict[str, Any]:
    free_memory(device)
    own_peak = reset_peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    before = read_memory("cpu")["resident_set"]
    progress = print_load() if plan.rank == 0 else lambda done, total: None

    def load() -> int:
        model = load_model(folder, plan, comm, LoadOptions(), device=device, progress=progress)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return sum(tensor.nbytes for tensor in model.resident.values())

    found = timed(load, comm)
    mine = [before, read_memory("cpu")["resident_peak"], torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0]
    host_before, host_peak, device_peak = (list(values) for values in zip(*comm.control_gather(mine), strict=True))
    peaks = {"host_before_of_ranks": host_before, "host_peak_of_ranks": host_peak, "device_peak_of_ranks": device_peak}
    return {**found, **peaks, "host_peak_since": "the load began" if own_peak else "the process began"}


def timed(work: Callable[[], int], comm: Communicator) -> dict[str, Any]:
    """Collective. Seconds of the slowest rank, the bytes that ``work`` returned on all of them, and those that the storage gave meanwhile."""
    comm.control_gather([0])  # all ranks begin together
    before, began = fetched(), time.perf_counter()
    nbytes = work()
    seconds, after = time.perf_counter() - began, fetched()
    came = -1 if before is None or after is None else after - before
    everyone = comm.control_gather([round(seconds * 1e9), nbytes, came])
    times, sizes, storage = zip(*everyone, strict=True)
    return {
        "seconds": max(times) / 1e9,
        "seconds_of_ranks": [ns / 1e9 for ns in times],
        "bytes": sum(sizes),
        "from_disk_bytes": None if min(storage) < 0 else sum(storage),
    }


def _first_rank_says(rank: int) -> Callable[[str], None]:
    return lambda words: print(words, flush=True) if rank == 0 else None


def disk_words(found: dict[str, Any], checkpoint: int) -> str:
    """How much of the checkpoint the disk gave, so how cold it was."""
    came = found["from_disk_bytes"]
    return "the kernel does not count reads of the disk" if came is None else f"{100 * came / checkpoint:.0f} % of the files' bytes came from the disk"


def load_words(load: dict[str, Any], checkpoint: int) -> str:
    pairs = zip(load["device_peak_of_ranks"], load["host_peak_of_ranks"], strict=True)
    peaks = ", ".join(f"{device / 1e9:.2f} + {host / 1e9:.2f}" for device, host in pairs)
    peaks += f" (host: since {load['host_peak_since']}, {max(load['host_before_of_ranks']) / 1e9:.2f} before)"
    return (
        f"load, files {load['files']:5} {load['seconds']:8.2f} s, {checkpoint / load['seconds'] / 1e9:.2f} GB/s of the checkpoint, "
        f"{load['bytes'] / load['seconds'] / 1e9:.2f} GB/s into all ranks; {disk_words(load, checkpoint)}; peak GB of each rank (device + host): {peaks}"
    )


def print_result(result: dict[str, Any]) -> None:
    whole = result["checkpoint_bytes"]
    print_head(f"load of a synthetic checkpoint of {whole / 1e9:.2f} GB, {result['layers']} layers, {result['scheme']}, ranks: {result['ranks']}", result)
    writing, disk = result["writing"], result["disk"]
    print(f"written by all ranks    {writing['seconds']:8.2f} s, {whole / writing['seconds'] / 1e9:.2f} GB/s, down to the disk")
    print(f"read by as many processes {disk['seconds']:6.2f} s, {whole / disk['seconds'] / 1e9:.2f} GB/s; {disk_words(disk, whole)}")
    for load in result["loads"]:
        print(load_words(load, whole))
