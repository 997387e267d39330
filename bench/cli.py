"""``phase-parallel bench …``: each table from one command."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..parallel.cluster import Cluster
from ..parallel.faults import SectionMismatch
from . import ar_table, article, denoise_accuracy, denoise_table, e2e_table, faults, load_table, node, node_picture, vae_table
from .ar_table import ArOptions
from .arguments import parser
from .article import ArticleOptions
from .denoise import STEPS
from .denoise_accuracy import AccuracyOptions
from .denoise_cases import DenoiseOptions, choose_schemes
from .denoise_plot import plot
from .disk import own_folder
from .e2e_table import E2eOptions
from .errors import BenchError
from .faults import FaultOptions
from .load_table import LoadRun
from .node import NodeOptions
from .node_launch import EqualDigests, StartLaunch
from .node_picture import PictureOptions
from .report import require_writable, write_result
from .vae_table import VaeOptions

TABLES = {"ar": ar_table, "denoise": denoise_table, "e2e": e2e_table, "load": load_table, "vae": vae_table}
OPTIONS = {"ar": ArOptions, "denoise": DenoiseOptions, "e2e": E2eOptions, "load": LoadRun, "vae": VaeOptions}
TOKENS = 1024
"""Of one text of bench node."""
ALL_LAYERS, ACCURATE_LAYERS = 32, 4
"""Of the release, and those that a device can hold in fp32 beside bf16."""
StartRanks = Callable[[Sequence[str], dict[str, Any]], None]
Join = Callable[[dict[str, Any]], AbstractContextManager[Cluster]]


def main(arguments: list[str], *, start_ranks: StartRanks, join: Join, launch: StartLaunch, equal_digests: EqualDigests) -> int:
    """``start_ranks`` starts this program once for each rank, which then gets its cluster from ``join``. ``launch`` starts ranks with ComfyUI."""
    if arguments[:1] == ["--as-rank"]:
        _as_rank(json.loads(Path(arguments[1]).read_text()), join)
        return 0
    options = parser().parse_args(arguments)
    if options.command == "plot":
        out = options.out or options.files[0].with_suffix(".png")
        require_writable(out)
        plot(options.files, out)
        return 0
    if options.command == "article" and options.render is not None:
        article.render(options.render)
        return 0
    if getattr(options, "device", "cuda") == "cpu":
        if getattr(options, "scale", "small") != "small":
            raise BenchError(f"bench {options.command} --device cpu only tries the program; add --scale small.")
    elif not torch.cuda.is_available():
        raise BenchError(f"bench {options.command} measures CUDA devices and this machine has none; run it on a machine with a GPU.")
    if options.command == "article":
        return _article(options, lambda words: main(words, start_ranks=start_ranks, join=join, launch=launch, equal_digests=equal_digests))
    if options.out is not None:
        require_writable(options.out)
    if options.command == "memory":
        from .prefix_memory import report

        report(options.ranks, options.layers, options.out)
        return 0
    if options.command in ("node", "faults"):
        {"node": _node, "faults": _faults}[options.command](options, launch, equal_digests)
        return 0
    {"ar": _ar, "denoise": _denoise, "e2e": _e2e, "load": _load, "vae": _vae}[options.command](options, start_ranks)
    return 0


def _device_count(device: str) -> int:
    return torch.cuda.device_count() if device == "cuda" else 1


def _e2e(options: argparse.Namespace, start_ranks: StartRanks) -> None:
    if options.alone:
        raise BenchError("bench e2e makes whole pictures, and a rank without its peers makes none; leave --alone out, or use bench ar and bench denoise.")
    ranks = options.ranks or _device_count(options.device)
    run = E2eOptions(
        schemes=choose_schemes(options.scheme, ranks, False, instead=""),
        ranks=ranks,
        tasks=() if options.task == "both" else (options.task,),
        layers=2 if options.scale == "small" else options.layers,
        small=options.scale == "small",
        repeats=options.repeats,
        text_tokens=options.tokens,
        steps=options.steps,
    )
    _measure("e2e", options, run, start_ranks)


def _accuracy(options: argparse.Namespace) -> None:
    if set(options.scheme) - {"single"} or (options.ranks or 1) != 1 or options.moe_table or options.sizes:
        raise BenchError("--accuracy compares models on one rank; leave --ranks, --moe-table, --sizes and every --scheme but single out.")
    if options.cfg or options.moe_layout or options.moe_path or options.reduction != "auto" or options.task == "ti2i":
        raise BenchError("--accuracy takes one step of t2i as the loader has it; leave --cfg, --moe-layout, --moe-path, --reduction and --task ti2i out.")
    small = options.scale == "small"
    run = AccuracyOptions(experts=tuple(options.moe_backend), layers=2 if small else options.layers or ACCURATE_LAYERS, small=small)
    result = denoise_accuracy.measure(run, _own_device(options.device))
    denoise_accuracy.print_result(result)
    if options.out is not None:
        write_result(result, options.out)
    denoise_accuracy.require_close(result)


def _denoise(options: argparse.Namespace, start_ranks: StartRanks) -> None:
    if options.accuracy:
        _accuracy(options)
        return
    ranks = options.ranks or (0 if options.alone else _device_count(options.device))
    alone = options.alone or ranks == 1
    if options.moe_table and (options.moe_layout or options.moe_path or options.moe_backend):
        raise BenchError("--moe-table chooses layouts, paths and backends itself; leave --moe-layout, --moe-path and --moe-backend out.")
    if options.sizes and options.task != "both":
        raise BenchError("--sizes measures prefixes of its own; leave --task out.")
    run = DenoiseOptions(
        schemes=choose_schemes(options.scheme, ranks, alone),
        ranks=ranks,
        alone=alone,
        tasks=() if options.task == "both" else (options.task,),
        cfg=() if options.cfg is None else (options.cfg,),
        layouts=() if options.moe_layout is None else (options.moe_layout,),
        paths=() if options.moe_path is None else (options.moe_path,),
        experts=tuple(options.moe_backend),
        moe_table=options.moe_table,
        sizes=options.sizes,
        reduction=options.reduction,
        layers=2 if options.scale == "small" else options.layers or ALL_LAYERS,
        small=options.scale == "small",
        repeats=options.repeats,
    )
    _measure("denoise", options, run, start_ranks)


def _vae(options: argparse.Namespace, start_ranks: StartRanks) -> None:
    ranks = 1 if options.alone else options.ranks or _device_count(options.device)
    run = VaeOptions(
        sizes=tuple(options.size),
        ranks=ranks,
        alone=ranks == 1,
        beside_gb=options.beside,
        small=options.scale == "small",
        repeats=options.repeats,
    )
    _measure("vae", options, run, start_ranks)


def _node(options: argparse.Namespace, launch: StartLaunch, equal_digests: EqualDigests) -> None:
    small, picture = options.scale == "small", options.task == "picture"
    if (options.tokens if picture else options.steps) is not None:
        raise BenchError("--tokens belongs to --task text and --steps to --task picture; leave the other one out.")
    ranks = options.ranks or _device_count(options.device)
    shared = {
        "scheme": options.scheme if ranks > 1 else "single",
        "ranks": ranks,
        "device": options.device,
        "layers": 2 if small else options.layers,
        "small": small,
        "repeats": options.repeats,
        "cancels": options.cancels,
        "compare": options.compare,
    }
    if picture:
        result = node_picture.measure(PictureOptions(**shared, steps=options.steps or STEPS), launch, equal_digests)
        node_picture.print_result(result)
    else:
        result = node.measure(NodeOptions(**shared, tokens=options.tokens or TOKENS), launch, equal_digests)
        node.print_result(result)
    if options.out is not None:
        write_result(result, options.out)


def _faults(options: argparse.Namespace, launch: StartLaunch, equal_digests: EqualDigests) -> None:
    ranks = options.ranks or _device_count(options.device)
    _require_devices(options.device, ranks)
    if ranks < 2:
        raise BenchError("bench faults kills one of several ranks, and there is one; give --ranks 2 or more, on as many GPUs.")
    result = faults.measure(FaultOptions(options.scheme, ranks, options.device, layers=2, small=True), launch, equal_digests)
    faults.print_result(result)
    if options.out is not None:
        write_result(result, options.out)
    faults.require_recovery(result)


def _load(options: argparse.Namespace, start_ranks: StartRanks) -> None:
    ranks, small = options.ranks or _device_count(options.device), options.scale == "small"
    _require_devices(options.device, ranks)
    with own_folder(options.folder or Path(tempfile.gettempdir()) / f"phase-parallel-load-{os.getuid()}") as folder:
        checkpoint, layers, _ = load_table.prepare(folder, small=small, gib=options.gib)
        run = LoadRun(options.scheme, ranks, ranks == 1, layers, small, str(checkpoint))
        _measure("load", options, run, start_ranks)


def _article(options: argparse.Namespace, bench: Callable[[list[str]], int]) -> int:
    devices = torch.cuda.device_count() if options.device == "cuda" else None
    run = ArticleOptions(
        out=options.out,
        parts=tuple(options.part),
        again=options.again,
        minutes=options.minutes,
        ranks=article.choose_ranks(options.ranks, devices),
        device=options.device,
        small=options.scale == "small",
        gib=options.gib,
        folder=options.folder,
    )
    return article.measure(run, bench)


def _ar(options: argparse.Namespace, start_ranks: StartRanks) -> None:
    ranks = options.ranks or _device_count(options.device)
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
    _measure("ar", options, run, start_ranks)


def _measure(bench: str, options: argparse.Namespace, run: ArOptions | DenoiseOptions | E2eOptions | LoadRun | VaeOptions, start_ranks: StartRanks) -> None:
    """In this process where one rank is all, else in one process a rank."""
    if not run.alone:
        _require_devices(options.device, run.ranks, ", or --alone")
        out = None if options.out is None else str(options.out.resolve())
        start_ranks(["bench"], {"bench": bench, "ranks": run.ranks, "device": options.device, "run": asdict(run), "out": out})
        return
    _show(bench, TABLES[bench].run_alone(run, _own_device(options.device)), options.out)


def _require_devices(device: str, ranks: int, instead: str = "") -> None:
    if device == "cuda" and ranks > torch.cuda.device_count():
        raise BenchError(f"{ranks} ranks need {ranks} GPUs and this machine has {torch.cuda.device_count()}; give fewer --ranks{instead}.")


def _own_device(kind: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")


def _show(bench: str, result: dict[str, Any], out: Path | None) -> None:
    TABLES[bench].print_result(result)
    if out is not None:
        write_result(result, out)


def _as_rank(options: dict[str, Any], join: Join) -> None:
    bench = options["bench"]
    with join(options) as cluster:
        try:
            result = TABLES[bench].run_rank(OPTIONS[bench](**options["run"]), cluster)
        except SectionMismatch as error:  # the sentence says all, other faults keep their trace
            raise BenchError(f"{error}.") from error
        if cluster.rank == 0:
            _show(bench, result, None if options["out"] is None else Path(options["out"]))
