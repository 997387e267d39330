"""A checkpoint folder of two shards with every kind of rule, small enough to be written anew for each test."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from phase_parallel.parallel.checkpoint import INDEX_NAME
from phase_parallel.parallel.plan import make_plan
from phase_parallel.parallel.slicing import ShardingTable

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
DTYPES = {"trunk": torch.float32}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"wide": (8, 6), "tall": (6, 8), "gated": (16, 4), "norm": (5,), "conv": (2, 3, 3, 3), "unused": (7,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def table(**plan: object) -> ShardingTable:
    made = ShardingTable(make_plan(**(plan or dict(name="single", world_size=1))))
    made.column_parallel("wide", (8, 6), "trunk", target="wide")
    made.row_parallel("tall", (6, 8), "trunk", target="tall")
    made.gated_column_parallel("gated", (16, 4), "trunk", target="gated")
    made.replicated("norm", (5,), "trunk")
    made.replicated("conv", (2, 3, 3, 3), "trunk")
    made.unused("unused", (7,))
    return made


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_folder(folder: Path) -> Path:
    values = tensors()
    parts = {FIRST: ["wide", "tall", "norm"], SECOND: ["gated", "conv", "unused"]}
    for name, keys in parts.items():
        save_file({key: values[key] for key in keys}, folder / name, metadata={"format": "pt"})
    write_index(folder, {key: name for name, keys in parts.items() for key in keys})
    return folder
