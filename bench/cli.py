"""``phase-parallel bench …``: each table from one command."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from .errors import BenchError


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="phase-parallel bench", description="Measure the pack with random weights of the 80B sizes.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="BENCH")
    memory = commands.add_parser("memory", help="peak memory of a long prefix on one rank")
    memory.add_argument("--ranks", type=int, default=4, choices=(1, 2, 4, 8), help="ranks that share the weights (default 4)")
    memory.add_argument("--layers", type=int, default=4, help="layers of the model (default 4)")
    memory.add_argument("--out", type=Path, metavar="FILE", help="also write the rows as JSON")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise BenchError("bench memory measures a CUDA device and this machine has none; run it on a machine with a GPU.")
    from .prefix_memory import report

    report(options.ranks, options.layers, options.out)
    return 0
