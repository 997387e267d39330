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
from ..kernels.moe import MOE_LAYOUTS, MOE_PATHS
from ..models.hunyuan_image_3.denoise import CFG_MODES
from ..parallel.cluster import Cluster
from ..parallel.faults import SectionMismatch
from . import ar_table, denoise_accuracy, denoise_table, e2e_table, node, node_picture, vae_table
from .ar_table import ArOptions
from .denoise import STEPS
from .denoise_accuracy import AccuracyOptions
from .denoise_cases import EXPERTS, SCHEMES, DenoiseOptions, choose_schemes
from .denoise_plot import plot
from .e2e_table import E2eOptions
from .errors import BenchError
from .node import NodeOptions
from .node_launch import EqualDigests, StartLaunch
from .node_picture import PictureOptions
from .report import write_result
from .vae_table import VaeOptions

TABLES = {"ar": ar_table, "denoise": denoise_table, "e2e": e2e_table, "vae": vae_table}
OPTIONS = {"ar": ArOptions, "denoise": DenoiseOptions, "e2e": E2eOptions, "vae": VaeOptions}
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
    options = _parser().parse_args(arguments)
    if options.command == "plot":
        plot(options.files, options.out or options.files[0].with_suffix(".png"))
        return 0
    if options.command in ("ar", "denoise", "e2e", "node", "vae") and options.device == "cpu":
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
    {"ar": _ar, "denoise": _denoise, "e2e": _e2e, "vae": _vae}[options.command](options, start_ranks)
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
    _add_denoise(commands.add_parser("denoise", help="one denoise step with guidance, ms and share of the floor, by plan, expert path and guidance"))
    plots = commands.add_parser("plot", help="the scaling curves of results of bench denoise as a PNG; needs matplotlib")
    plots.add_argument("files", nargs="+", type=Path, metavar="FILE", help="results of bench denoise --out; predictions start from the first")
    plots.add_argument("--out", type=Path, metavar="PNG", help="(default: beside the first FILE, with its name)")
    _add_e2e(commands.add_parser("e2e", help="whole pictures with guidance: seconds of every part from the prompt to the pixels, by plan"))
    _add_vae(commands.add_parser("vae", help="decode and encode pictures on one rank and on all: ms, memory, difference"))
    _add_node(commands.add_parser("node", help="text of the Think / Recaption node or a picture by KSampler in ComfyUI: speed on the page, time to cancel"))
    return parser


def _device_count(device: str) -> int:
    return torch.cuda.device_count() if device == "cuda" else 1


def _add_denoise(denoise: argparse.ArgumentParser) -> None:
    denoise.add_argument("--alone", action="store_true", help="measure one rank of each scheme on one GPU, without its peers")
    denoise.add_argument("--ranks", type=int, help="ranks (default: one for each GPU; with --alone the schemes of any number)")
    denoise.add_argument("--scheme", choices=tuple(SCHEMES), action="append", default=[], help="may be repeated (default: all that fit the ranks)")
    denoise.add_argument("--task", choices=("t2i", "ti2i", "both"), default="both")
    denoise.add_argument("--cfg", choices=CFG_MODES, help="both branches in one pass or one after the other (default: both ways)")
    denoise.add_argument("--moe-layout", choices=MOE_LAYOUTS, help="(default: both)")
    denoise.add_argument("--moe-path", choices=MOE_PATHS, help="(default: both)")
    denoise.add_argument(
        "--moe-backend", choices=EXPERTS, action="append", default=[],
        help="who computes the routed experts; may be repeated (default: as the other kernels). grouped_mm, PyTorch's own product, is for this table only",
    )  # fmt: skip
    denoise.add_argument(
        "--moe-table", action="store_true", help="instead of these choices: our experts, FlashInfer's and PyTorch's in the layouts and paths to compare"
    )
    denoise.add_argument(
        "--sizes", action="store_true", help="instead of the tasks: pictures of 512x512, 1024x1024 and 1024x2048 behind prefixes of 1k to 10k tokens"
    )
    denoise.add_argument("--reduction", choices=("auto", "group"), default="auto", help="group: NCCL adds up the ranks' parts, and nothing is recorded")
    denoise.add_argument(
        "--accuracy", action="store_true", help="instead of times: how far the velocities of one step lie from fp32, by eager and by fused kernels"
    )
    denoise.add_argument("--layers", type=int, help="(default: 32, with --accuracy 4)")
    denoise.add_argument("--scale", choices=("full", "small"), default="full", help="small: toy sizes, to try the program")
    denoise.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the program, with --scale small")
    denoise.add_argument("--repeats", type=int, default=3)
    denoise.add_argument("--out", type=Path, metavar="FILE", help="also write everything as JSON")


def _add_vae(vae: argparse.ArgumentParser) -> None:
    vae.add_argument("--alone", action="store_true", help="one rank makes everything, whatever the number of GPUs")
    vae.add_argument("--ranks", type=int, choices=(1, 2, 4, 8), help="ranks (default: one for each GPU)")
    vae.add_argument("--size", type=_size, action="append", default=[], metavar="HxW", help="may be repeated (default: 1024x1024, 2048x2048, the widest)")
    vae.add_argument("--beside", type=float, default=0.0, metavar="GB", help="memory of each GPU that is taken first, as weights would (default 0)")
    vae.add_argument("--scale", choices=("full", "small"), default="full", help="small: toy sizes, to try the program")
    vae.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the program, with --scale small")
    vae.add_argument("--repeats", type=int, default=3)
    vae.add_argument("--out", type=Path, metavar="FILE", help="also write everything as JSON")


def _size(words: str) -> tuple[int, int]:
    height, _, width = words.partition("x")
    if not (height.isdigit() and width.isdigit()):
        raise argparse.ArgumentTypeError(f"{words!r} is no size in pixels; write height x width, such as 1024x768")
    return int(height), int(width)


def _add_node(node: argparse.ArgumentParser) -> None:
    node.add_argument("--task", choices=("text", "picture"), default="text", help="default: text")
    node.add_argument("--scheme", choices=("tp", "hybrid", "replicated"), default="tp")
    node.add_argument("--ranks", type=int, help="ranks (default: one for each GPU)")
    node.add_argument("--layers", type=int, default=32)
    node.add_argument("--scale", choices=("full", "small"), default="full", help="small: toy sizes, to try the program")
    node.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the program, with --scale small")
    node.add_argument("--tokens", type=int, help="tokens of one text (default 1024)")
    node.add_argument("--steps", type=int, help="steps of one picture (default 50)")
    node.add_argument("--repeats", type=int, default=3, help="texts or pictures that are measured (default 3)")
    node.add_argument("--cancels", type=int, default=5, help="how often one is cancelled (default 5)")
    node.add_argument("--compare", type=Path, metavar="FILE", help="result of bench ar (text) or bench denoise (picture) in the same setting")
    node.add_argument("--out", type=Path, metavar="FILE", help="also write everything as JSON")


def _add_e2e(e2e: argparse.ArgumentParser) -> None:
    e2e.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)  # as the other tables have it; refused with the reason
    e2e.add_argument("--ranks", type=int, help="ranks (default: one for each GPU)")
    e2e.add_argument("--scheme", choices=tuple(SCHEMES), action="append", default=[], help="may be repeated (default: all that fit the ranks)")
    e2e.add_argument("--task", choices=("t2i", "ti2i", "both"), default="both")
    e2e.add_argument("--layers", type=int, default=32)
    e2e.add_argument("--scale", choices=("full", "small"), default="full", help="small: toy sizes, to try the program")
    e2e.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the program, with --scale small")
    e2e.add_argument("--repeats", type=int, default=3, help="pictures that are measured, behind a first one (default 3)")
    e2e.add_argument("--out", type=Path, metavar="FILE", help="also write everything as JSON")


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
    )
    _measure("e2e", options, run, start_ranks)


def _accuracy(options: argparse.Namespace) -> None:
    if set(options.scheme) - {"single"} or (options.ranks or 1) != 1 or options.moe_table or options.sizes:
        raise BenchError("--accuracy compares models on one rank; leave --ranks, --moe-table, --sizes and every --scheme but single out.")
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


def _measure(bench: str, options: argparse.Namespace, run: ArOptions | DenoiseOptions | E2eOptions | VaeOptions, start_ranks: StartRanks) -> None:
    """In this process where one rank is all, else in one process a rank."""
    if not run.alone:
        if options.device == "cuda" and run.ranks > torch.cuda.device_count():
            raise BenchError(f"{run.ranks} ranks need {run.ranks} GPUs and this machine has {torch.cuda.device_count()}; give fewer --ranks, or --alone.")
        out = None if options.out is None else str(options.out.resolve())
        start_ranks(["bench"], {"bench": bench, "ranks": run.ranks, "device": options.device, "run": asdict(run), "out": out})
        return
    _show(bench, TABLES[bench].run_alone(run, _own_device(options.device)), options.out)


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
