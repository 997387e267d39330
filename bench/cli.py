"""``phase-parallel bench …``: each table from one command."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..kernels.kernel_set import MOE_BACKENDS
from ..kernels.moe import MOE_LAYOUTS
from ..parallel.cluster import Cluster
from .errors import BenchError
from .node import EqualDigests, NodeOptions, StartLaunch, measure, print_result

StartRanks = Callable[[Sequence[str], dict[str, Any]], None]
Join = Callable[[dict[str, Any]], AbstractContextManager[Cluster]]


def main(arguments: list[str], *, start_ranks: StartRanks, join: Join, launch: StartLaunch, equal_digests: EqualDigests) -> int:
    """``start_ranks`` starts this program once for each rank, which then gets its cluster from ``join``. ``launch`` starts ranks with ComfyUI."""
    if arguments[:1] == ["--as-rank"]:
        _as_rank(json.loads(Path(arguments[1]).read_text()), join)
        return 0
    options = _parser().parse_args(arguments)
    if options.command in ("ar", "node") and options.device == "cpu":
        if options.scale != "small":
            raise BenchError(f"bench {options.command} --device cpu only tries the program; add --scale small.")
    elif not torch.cuda.is_available():
        raise BenchError(f"bench {options.command} measures CUDA devices and this machine has none; run it on a machine with a GPU.")
    if options.command == "memory":
        from .prefix_memory import report

        report(options.ranks, options.layers, options.out)
        return 0
    if options.command == "node":
        _node(options, launch, equal_digests)
        return 0
    _ar(options, start_ranks)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="phase-parallel bench", description="Measure the pack with random weights of the 80B sizes.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="BENCH")
    memory = commands.add_parser("memory", help="peak memory of a long prefix on one rank")
    memory.add_argument("--ranks", type=int, default=4, choices=(1, 2, 4, 8), help="ranks that share the weights (default 4)")
    memory.add_argument("--layers", type=int, default=4, help="layers of the model (default 4)")
    memory.add_argument("--out", type=Path, metavar="FILE", help="also write the rows as JSON")
    ar = commands.add_parser("ar", help="prefill and decode, ms and share of the floor")
    ar.add_argument("--scheme", choices=("tp", "hybrid", "replicated"), default="tp")
    ar.add_argument("--ranks", type=int, help="ranks (default: one for each GPU)")
    ar.add_argument("--alone", action="store_true", help="measure one rank of --ranks on one GPU, without its peers")
    ar.add_argument("--layers", type=int, default=32)
    ar.add_argument("--moe-layout", choices=MOE_LAYOUTS, default="micro_major")
    ar.add_argument("--moe-backend", choices=MOE_BACKENDS, default="auto", help="who computes the routed experts (default: as the other kernels)")
    ar.add_argument("--scale", choices=("full", "small"), default="full", help="small: toy sizes, to try the program")
    ar.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the program, with --scale small")
    ar.add_argument("--tokens", type=int, default=64, help="tokens of one measurement (default 64)")
    ar.add_argument("--repeats", type=int, default=5)
    ar.add_argument("--no-eager", action="store_true", help="leave out the slow rows")
    ar.add_argument("--out", type=Path, metavar="FILE", help="also write everything as JSON")
    node = commands.add_parser("node", help="text of the Think / Recaption node in ComfyUI: speed on the page, time to cancel")
    node.add_argument("--scheme", choices=("tp", "hybrid", "replicated"), default="tp")
    node.add_argument("--ranks", type=int, help="ranks (default: one for each GPU)")
    node.add_argument("--layers", type=int, default=32)
    node.add_argument("--scale", choices=("full", "small"), default="full", help="small: toy sizes, to try the program")
    node.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the program, with --scale small")
    node.add_argument("--tokens", type=int, default=1024, help="tokens of one text (default 1024)")
    node.add_argument("--repeats", type=int, default=3, help="texts that are measured (default 3)")
    node.add_argument("--cancels", type=int, default=5, help="how often a text is cancelled (default 5)")
    node.add_argument("--compare", type=Path, metavar="FILE", help="result of bench ar in the same setting")
    node.add_argument("--out", type=Path, metavar="FILE", help="also write everything as JSON")
    return parser


def _node(options: argparse.Namespace, launch: StartLaunch, equal_digests: EqualDigests) -> None:
    from .ar_table import write_result

    small = options.scale == "small"
    ranks = options.ranks or (torch.cuda.device_count() if options.device == "cuda" else 1)
    run = NodeOptions(
        scheme=options.scheme if ranks > 1 else "single",
        ranks=ranks,
        device=options.device,
        layers=2 if small else options.layers,
        small=small,
        tokens=options.tokens,
        repeats=options.repeats,
        cancels=options.cancels,
        compare=options.compare,
    )
    result = measure(run, launch, equal_digests)
    print_result(result)
    if options.out is not None:
        write_result(result, options.out)


def _ar(options: argparse.Namespace, start_ranks: StartRanks) -> None:
    from .ar_table import ArOptions, print_result, run_alone, write_result

    cuda = options.device == "cuda"
    ranks = options.ranks or (torch.cuda.device_count() if cuda else 1)
    run = ArOptions(
        scheme=options.scheme,
        ranks=ranks,
        alone=options.alone or ranks == 1,
        layers=2 if options.scale == "small" else options.layers,
        layout=options.moe_layout,
        moe_backend=options.moe_backend,
        small=options.scale == "small",
        tokens=options.tokens,
        repeats=options.repeats,
        eager=not options.no_eager,
    )
    if not run.alone:
        if cuda and ranks > torch.cuda.device_count():
            raise BenchError(f"{ranks} ranks need {ranks} GPUs and this machine has {torch.cuda.device_count()}; give fewer --ranks, or --alone.")
        out = None if options.out is None else str(options.out.resolve())
        start_ranks(["bench"], {"ranks": ranks, "device": options.device, "run": asdict(run), "out": out})
        return
    result = run_alone(run, torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"))
    print_result(result)
    if options.out is not None:
        write_result(result, options.out)


def _as_rank(options: dict[str, Any], join: Join) -> None:
    from .ar_table import ArOptions, print_result, run_rank, write_result

    with join(options) as cluster:
        result = run_rank(ArOptions(**options["run"]), cluster)
        if cluster.rank == 0:
            print_result(result)
            if options["out"] is not None:
                write_result(result, Path(options["out"]))
