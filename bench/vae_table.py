"""The table of ``phase-parallel bench vae``: which pictures, by one rank and by all of them; the slowest rank counts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..models.hunyuan_image_3.engine import Engine
from ..models.hunyuan_image_3.loading import LoadOptions
from ..models.hunyuan_image_3.sequence import resolution_table
from ..parallel.cluster import Cluster
from ..parallel.collectives import Communicator
from ..parallel.groups import ProcessGroups
from ..parallel.plan import ParallelPlan, make_plan
from ..parallel.section import SectionKey, open_section
from .environment import describe_machine
from .errors import BenchError
from .random_model import random_model
from .release import RELEASE, SMALL, Release, from_spec
from .report import print_head
from .vae import DIRECTIONS, VaePicture, VaeRow, measure_way

SQUARES = ((1024, 1024), (2048, 2048))
SMALL_SIZES = ((64, 64), (32, 128))
TOY = replace(SMALL, layers=1, kv_heads=8)
FULL = replace(
    TOY, latent_channels=RELEASE.latent_channels, vae_channels=RELEASE.vae_channels, vae_blocks=RELEASE.vae_blocks, image_base_size=RELEASE.image_base_size
)
"""The VAE of the release beside a toy trunk, which has no part in this."""


@dataclass(frozen=True)
class VaeOptions:
    """``sizes``: (height, width) in pixels; none means all. ``beside_gb``: memory of each device that something else holds, as weights would.
    ``alone``: one rank does everything."""

    sizes: tuple[tuple[int, int], ...]
    ranks: int
    alone: bool
    beside_gb: float
    small: bool
    repeats: int


def sizes_of(options: VaeOptions, built: Release) -> tuple[tuple[int, int], ...]:
    """Those that were asked for, or two squares and the widest of the model's own sizes.

    Raises BenchError for a size that the VAE cannot take.
    """
    factor = built.config.vae.ffactor_spatial
    for height, width in options.sizes:
        if height % factor or width % factor or min(height, width) < factor:
            raise BenchError(f"a picture of {height}x{width} (height x width) has no whole number of latent pixels; give multiples of {factor}")
    return tuple(tuple(size) for size in options.sizes) or (SMALL_SIZES if options.small else SQUARES + (widest(built),))


def widest(built: Release) -> tuple[int, int]:
    """(height, width) of the flattest size in the model's table."""
    return min(resolution_table(built.config, built.tokenizer).rows, key=lambda row: row[0] / row[1])


def run_alone(options: VaeOptions, device: torch.device) -> dict[str, Any]:
    plan = make_plan("single", world_size=1)
    comm = Communicator(plan, ProcessGroups(plan, {}, None, "alone"))
    return _result(options, device, _measure(options, plan, comm, device))


def run_rank(options: VaeOptions, cluster: Cluster) -> dict[str, Any]:
    """Collective. Refuses ranks whose pictures differ."""
    plan = make_plan("tp", world_size=options.ranks, rank=cluster.rank)
    with open_section(cluster, SectionKey("bench", "vae", 0, ""), plan, phase="bench") as section:
        rows = _measure(options, plan, section.communicator, cluster.device, section.agree)
        section.exit("")
    return _result(options, cluster.device, rows)


def _measure(
    options: VaeOptions, plan: ParallelPlan, comm: Communicator, device: torch.device, agree: Callable[[str, str], None] = lambda what, digest: None
) -> list[dict[str, Any]]:
    built = from_spec(TOY if options.small else FULL)
    sizes = sizes_of(options, built)
    beside = torch.empty(int(options.beside_gb * 1e9), dtype=torch.uint8, device=device)
    load = LoadOptions()
    engine = Engine(random_model(built.config, plan, comm, load, device=device), built.tokenizer, options=load)
    rows: list[dict[str, Any]] = []

    def keep(row: VaeRow) -> None:
        if row.way == "all ranks":  # what each makes for itself may differ in the last digits
            agree(f"{row.direction}d picture of {row.height}x{row.width}", row.digest)
        rows.append(slowest(asdict(row), comm))
        if plan.rank == 0:  # a long run that is stopped has shown what it had
            print(row_words(rows[-1]), file=sys.stderr, flush=True)

    for height, width in sizes:
        picture = VaePicture(engine, height, width)
        for direction in DIRECTIONS:
            settings = {"repeats": options.repeats, "barrier": lambda: comm.control_gather([0])}
            row, wanted = measure_way(picture, direction, "one rank", 1, None, **settings)
            keep(row)
            if plan.world_size > 1:
                keep(measure_way(picture, direction, "all ranks", plan.world_size, wanted, **settings)[0])
            del wanted
    del beside
    return rows


def slowest(row: dict[str, Any], comm: Communicator) -> dict[str, Any]:
    """Collective. The row as its slowest rank saw it, with the memory of the fullest one."""
    everyone = comm.control_gather([*(round(row["ms"][name] * 1e6) for name in ("median", "minimum", "maximum")), round(row["peak_gb"] * 1e9)])
    median, minimum, maximum = (ns / 1e6 for ns in max(values[:3] for values in everyone))
    peaks = [values[3] / 1e9 for values in everyone]
    return row | {"ms": {"median": median, "minimum": minimum, "maximum": maximum}, "peak_gb": max(peaks), "peak_gb_of_ranks": peaks}


def _result(options: VaeOptions, device: torch.device, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {**describe_machine(device), "ranks": options.ranks, "alone": options.alone, "beside_gb": options.beside_gb, "rows": rows}


def row_words(row: dict[str, Any]) -> str:
    ms, path = row["ms"], row["path"]
    if path == "tiles":
        path = f"tiles of {row['tile'][0]}x{row['tile'][1]}"
    how = path if row["bands"] == 1 else f"{path}, {row['bands']} bands"
    differs = "" if row["difference"] is None else f", differs by at most {row['difference']:.1e} of {row['largest']:.2g}"
    return (
        f"{row['direction']} {row['height']:5}x{row['width']:<5} {row['way']:9} of {row['ranks']} {how:28}{ms['median']:10.1f} ms "
        f"({ms['minimum']:.1f} … {ms['maximum']:.1f}), peak {row['peak_gb']:.2f} GB beside the weights, counted {row['need_gb']:.2f}{differs}, "
        f"result {row['digest'][:6]}"
    )


def print_result(result: dict[str, Any]) -> None:
    ranks = result["ranks"]
    print_head(f"VAE in fp32, {ranks} rank{'s' * (ranks > 1)}, {result['beside_gb']:g} GB of each held by something else", result)
    print("   'one rank' makes the whole picture; with more ranks each of them does so at the same time, for itself. Tiles are made, not joined")
    for row in result["rows"]:
        print(row_words(row))
