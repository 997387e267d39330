"""The command line of ``phase-parallel bench``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from ..kernels.kernel_set import MOE_BACKENDS
from ..kernels.moe import MOE_LAYOUTS, MOE_PATHS
from ..models.hunyuan_image_3.denoise import CFG_MODES
from .denoise_cases import EXPERTS, SCHEMES


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="phase-parallel bench", description="Measure the pack with random weights of the 80B sizes.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="BENCH")
    memory = commands.add_parser("memory", help="peak memory of a long prefix on one rank")
    memory.add_argument("--ranks", type=_count, default=4, choices=(1, 2, 4, 8), help="ranks that share the weights (default 4)")
    memory.add_argument("--layers", type=_count, default=4, help="layers of the model (default 4)")
    memory.add_argument("--out", type=Path, metavar="FILE", help="also write the rows as JSON")
    _add_ar(commands.add_parser("ar", help="prefill and decode, ms and share of the floor"))
    _add_denoise(commands.add_parser("denoise", help="one denoise step with guidance, ms and share of the floor, by plan, expert path and guidance"))
    plots = commands.add_parser("plot", help="the scaling curves of results of bench denoise as a PNG; needs matplotlib")
    plots.add_argument("files", nargs="+", type=Path, metavar="FILE", help="results of bench denoise --out; predictions start from the first")
    plots.add_argument("--out", type=Path, metavar="PNG", help="(default: beside the first FILE, with its name)")
    _add_e2e(commands.add_parser("e2e", help="whole pictures with guidance: seconds of every part from the prompt to the pixels, by plan"))
    _add_vae(commands.add_parser("vae", help="decode and encode pictures on one rank and on all: ms, memory, difference"))
    _add_load(commands.add_parser("load", help="load a synthetic checkpoint from the local disk on all ranks: seconds, memory, GB/s against the disk's own"))
    _add_faults(commands.add_parser("faults", help="kill a rank of a launch while it writes and while it draws: seconds until all are back"))
    _add_article(commands.add_parser("article", help="all tables of one machine, resumable, as JSON and as one page beside the published figures"))
    _add_node(commands.add_parser("node", help="text of the Think / Recaption node or a picture by KSampler in ComfyUI: speed on the page, time to cancel"))
    return parser


def _add_ar(ar: argparse.ArgumentParser) -> None:
    ar.add_argument("--scheme", choices=("tp", "hybrid", "replicated"), default="tp")
    ar.add_argument("--ranks", type=_count, help="ranks (default: one for each GPU)")
    ar.add_argument("--alone", action="store_true", help="measure one rank of --ranks on one GPU, without its peers")
    ar.add_argument("--layers", type=_count, default=32)
    ar.add_argument("--moe-layout", choices=MOE_LAYOUTS, default="micro_major")
    ar.add_argument("--moe-backend", choices=MOE_BACKENDS, default="auto", help="who computes the routed experts (default: as the other kernels)")
    ar.add_argument("--scale", choices=("full", "small"), default="full", help="small: toy sizes, to try the program")
    ar.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the program, with --scale small")
    ar.add_argument("--tokens", type=_count, default=64, help="tokens of one measurement (default 64)")
    ar.add_argument("--repeats", type=_count, default=5)
    ar.add_argument("--no-eager", action="store_true", help="leave out the slow rows")
    ar.add_argument("--out", type=Path, metavar="FILE", help="also write everything as JSON")


def _add_denoise(denoise: argparse.ArgumentParser) -> None:
    denoise.add_argument("--alone", action="store_true", help="measure one rank of each scheme on one GPU, without its peers")
    denoise.add_argument("--ranks", type=_count, help="ranks (default: one for each GPU; with --alone the schemes of any number)")
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
    denoise.add_argument("--layers", type=_count, help="(default: 32, with --accuracy 4)")
    denoise.add_argument("--scale", choices=("full", "small"), default="full", help="small: toy sizes, to try the program")
    denoise.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the program, with --scale small")
    denoise.add_argument("--repeats", type=_count, default=3)
    denoise.add_argument("--out", type=Path, metavar="FILE", help="also write everything as JSON")


def _add_vae(vae: argparse.ArgumentParser) -> None:
    vae.add_argument("--alone", action="store_true", help="one rank makes everything, whatever the number of GPUs")
    vae.add_argument("--ranks", type=_count, choices=(1, 2, 4, 8), help="ranks (default: one for each GPU)")
    vae.add_argument("--size", type=_size, action="append", default=[], metavar="HxW", help="may be repeated (default: 1024x1024, 2048x2048, the widest)")
    vae.add_argument(
        "--beside", type=_amount("memory in GB"), default=0.0, metavar="GB", help="memory of each GPU that is taken first, as weights would (default 0)"
    )
    vae.add_argument("--scale", choices=("full", "small"), default="full", help="small: toy sizes, to try the program")
    vae.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the program, with --scale small")
    vae.add_argument("--repeats", type=_count, default=3)
    vae.add_argument("--out", type=Path, metavar="FILE", help="also write everything as JSON")


def _count(words: str) -> int:
    if not (words.isdigit() and int(words)):
        raise argparse.ArgumentTypeError(f"{words!r} is no number of times or things; give 1 or more")
    return int(words)


def _amount(of: str) -> Callable[[str], float]:
    def amount(words: str) -> float:
        try:
            value = float(words)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{words!r} is no amount of {of}; give 0 or more")
        return value

    return amount


def _size(words: str) -> tuple[int, int]:
    height, _, width = words.partition("x")
    if not (height.isdigit() and width.isdigit()):
        raise argparse.ArgumentTypeError(f"{words!r} is no size in pixels; write height x width, such as 1024x768")
    return int(height), int(width)


def _add_load(load: argparse.ArgumentParser) -> None:
    load.add_argument("--ranks", type=_count, choices=(1, 2, 4, 8), help="ranks (default: one for each GPU)")
    load.add_argument("--scheme", choices=("tp", "hybrid", "replicated"), default="tp", help="the loader's plan (default: tp)")
    load.add_argument("--gib", type=_amount("GiB"), metavar="GIB", help="the most that the checkpoint may have (default: what the disk bears, up to the whole)")
    load.add_argument("--folder", type=Path, metavar="DIR", help="where it is written, and removed at the end (default: in the folder for temporary files)")
    load.add_argument("--scale", choices=("full", "small"), default="full", help="small: toy sizes, to try the program")
    load.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the program, with --scale small")
    load.add_argument("--out", type=Path, metavar="FILE", help="also write everything as JSON")


def _add_faults(faults: argparse.ArgumentParser) -> None:
    faults.add_argument("--ranks", type=_count, choices=(2, 4, 8), help="ranks (default: one for each GPU)")
    faults.add_argument("--scheme", choices=("tp", "hybrid", "replicated"), default="tp")
    faults.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: ranks join through gloo instead of NCCL")
    faults.add_argument("--out", type=Path, metavar="FILE", help="also write everything as JSON")


def _add_article(article: argparse.ArgumentParser) -> None:
    where = article.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, metavar="DIR", help="folder of the results: a JSON file each, article.md, PNG curves; what is there is kept")
    where.add_argument("--render", type=Path, metavar="DIR", help="measure nothing, write article.md and the curves again from the JSON files there")
    article.add_argument("--part", action="append", default=[], metavar="NAME", help="only this one; may be repeated (default: all without a result)")
    article.add_argument("--again", action="store_true", help="measure also what has a result, and replace it")
    article.add_argument("--minutes", type=_amount("minutes"), metavar="M", help="begin nothing more after so many minutes; call again for the rest")
    article.add_argument("--ranks", type=_count, choices=(2, 4), help="ranks (default: 4, or 2 where there are fewer GPUs)")
    article.add_argument("--gib", type=_amount("GiB"), metavar="GIB", help="part load: the most that the checkpoint may have")
    article.add_argument("--folder", type=Path, metavar="DIR", help="part load: where the checkpoint is written")
    article.add_argument("--scale", choices=("full", "small"), default="full", help="small: toy sizes, to try the program")
    article.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the program, with --scale small")


def _add_node(node: argparse.ArgumentParser) -> None:
    node.add_argument("--task", choices=("text", "picture"), default="text", help="default: text")
    node.add_argument("--scheme", choices=("tp", "hybrid", "replicated"), default="tp")
    node.add_argument("--ranks", type=_count, help="ranks (default: one for each GPU)")
    node.add_argument("--layers", type=_count, default=32)
    node.add_argument("--scale", choices=("full", "small"), default="full", help="small: toy sizes, to try the program")
    node.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the program, with --scale small")
    node.add_argument("--tokens", type=_count, help="tokens of one text (default 1024)")
    node.add_argument("--steps", type=_count, help="steps of one picture (default 50)")
    node.add_argument("--repeats", type=_count, default=3, help="texts or pictures that are measured (default 3)")
    node.add_argument("--cancels", type=int, default=5, help="how often one is cancelled (default 5)")
    node.add_argument("--compare", type=Path, metavar="FILE", help="result of bench ar (text) or bench denoise (picture) in the same setting")
    node.add_argument("--out", type=Path, metavar="FILE", help="also write everything as JSON")


def _add_e2e(e2e: argparse.ArgumentParser) -> None:
    e2e.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)  # as the other tables have it; refused with the reason
    e2e.add_argument("--ranks", type=_count, help="ranks (default: one for each GPU)")
    e2e.add_argument("--scheme", choices=tuple(SCHEMES), action="append", default=[], help="may be repeated (default: all that fit the ranks)")
    e2e.add_argument("--task", choices=("t2i", "ti2i", "both"), default="both")
    e2e.add_argument("--tokens", type=_count, help="tokens of each text (default: 750 and 460, as published)")
    e2e.add_argument("--steps", type=_count, help="steps of each picture (default: 50)")
    e2e.add_argument("--layers", type=_count, default=32)
    e2e.add_argument("--scale", choices=("full", "small"), default="full", help="small: toy sizes, to try the program")
    e2e.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the program, with --scale small")
    e2e.add_argument("--repeats", type=_count, default=3, help="pictures that are measured, behind a first one (default 3)")
    e2e.add_argument("--out", type=Path, metavar="FILE", help="also write everything as JSON")
