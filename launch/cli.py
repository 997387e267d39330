"""The command line: `phase-parallel up | demo | status | logs | doctor | check | bench | train | judge`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from ..bench.errors import BenchError
from ..parallel.environment import SECRET
from ..parallel.plan import PLAN_NAMES
from ..parallel.rank_logs import MAXIMUM_LINES
from ..train.errors import MiniError
from .errors import LaunchError


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Returns its exit code; a LaunchError becomes one line on stderr and 1."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["check"]:
        from . import check  # reads its own options

        return _report_errors(lambda: check.main(words[1:]))
    if words[:1] == ["judge"]:
        from . import judge

        return _report_errors(lambda: judge.main(words[1:]))
    if words[:1] == ["bench"]:
        from ..bench import cli as bench
        from .demo_client import wait_for_equal_digests
        from .running import Launch
        from .spmd import joined, start_ranks

        return _report_errors(
            lambda: bench.main(
                words[1:],
                start_ranks=start_ranks,
                join=lambda options: joined(options, name="bench", timeout_s=300.0),
                launch=Launch,
                equal_digests=wait_for_equal_digests,
            )
        )
    if words[:1] == ["train"]:
        from ..bench.report import require_folder
        from ..train import cli as train

        return _report_errors(lambda: train.main(words[1:], require_folder=require_folder))
    # Everything behind the first `--` belongs to ComfyUI; argparse would drop the second of two `--`.
    comfy_flags: list[str] = []
    if "--" in words:
        comfy_flags = words[words.index("--") + 1 :]
        words = words[: words.index("--")]
    parser = make_parser()
    options = parser.parse_args(words)
    if comfy_flags and options.command != "up":
        parser.error(f"`--` and ComfyUI flags go with `up`, not with `{options.command}`")
    return _report_errors(lambda: _COMMANDS[options.command](options, comfy_flags))


def _report_errors(command: Callable[[], int]) -> int:
    try:
        return command()
    except (LaunchError, BenchError, MiniError) as error:
        print(f"phase-parallel: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="phase-parallel", description="Several ComfyUI processes, one device each, make one image together.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    _add_up(commands)
    demo = commands.add_parser("demo", help="make pictures on four ranks, from requests to rank 0")
    demo.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda where there is one"
    )
    demo.add_argument(
        "--output", type=Path, default=Path("demo_output"), metavar="DIR", help="default: demo_output"
    )
    demo.add_argument(
        "--checkpoint",
        choices=("mini", "random"),
        default="mini",
        help="mini: eight pictures by the checkpoints that come with this pack (default); random: one image of random weights, which is noise",
    )

    commands.add_parser("status", help="show the running launches and their ranks")

    logs = commands.add_parser("logs", help="show what the ranks of the running launches wrote last")
    logs.add_argument("--rank", type=int, help="only this one (default: all)")
    logs.add_argument("--lines", type=int, default=40, help=f"of each rank, at most {MAXIMUM_LINES} (default 40)")

    doctor = commands.add_parser("doctor", help="check this machine and say what to do")
    doctor.add_argument("--model", type=Path, metavar="DIR", help="also check this checkpoint folder")

    # Only for the list of commands; `main` hands the words behind it to the command itself.
    commands.add_parser("check", help="compare this pack with every case of a golden folder", add_help=False)
    commands.add_parser("bench", help="measure speed and memory with random weights", add_help=False)
    commands.add_parser("train", help="train the mini model that the demo uses, from nothing", add_help=False)
    commands.add_parser("judge", help="have a mini checkpoint draw unseen scenes and look at the pictures", add_help=False)
    return parser


def _add_up(commands: argparse._SubParsersAction) -> None:
    up = commands.add_parser(
        "up", help="start the ranks and stay until Ctrl-C", usage="%(prog)s [options] [-- ComfyUI flags]"
    )
    up.add_argument(
        "--ranks", type=int, help="number of processes (default: one per CUDA device, or 4 on a CPU)"
    )
    up.add_argument(
        "--plan",
        choices=("auto", *PLAN_NAMES),
        default="auto",
        help="what 'auto' means in the loader (default: it chooses by the ranks and their memory)",
    )
    up.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda where there is one"
    )
    up.add_argument(
        "--port", type=int, help="port of the ComfyUI to open (default: 8188, or the next free one)"
    )
    up.add_argument(
        "--model",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="a checkpoint folder, or a folder of them, to offer in the loader; may be given several times",
    )
    up.add_argument(
        "--base", type=Path, metavar="DIR", help="folder for models, input, output and user settings"
    )
    up.add_argument("--started-by", help=argparse.SUPPRESS)  # a Parent, see there
    up.add_argument(
        "--restarts", type=int, help="how often failed ranks are started again (default 3; with --nnodes never)"
    )
    up.add_argument("--nnodes", type=int, default=1, metavar="M", help="machines; start `up` with --ranks N on each of them (default 1)")
    up.add_argument(
        "--rdzv-endpoint", metavar="HOST:PORT", help="several machines: address of machine 0 and a free port there"
    )
    up.add_argument("--node-rank", type=int, metavar="R", help="several machines: number of this one; 0 shows ComfyUI")
    up.add_argument(
        "--secret-file", type=Path, metavar="FILE", help=f"several machines: holds the launch's secret (default: variable {SECRET})"
    )


def _up(options: argparse.Namespace, comfy_flags: list[str]) -> int:
    from .parent import Parent
    from .up import UpOptions, up

    return up(
        UpOptions(
            ranks=options.ranks,
            plan=None if options.plan == "auto" else options.plan,
            device=options.device,
            port=options.port,
            models=tuple(options.model),
            base=options.base,
            restarts=options.restarts,
            nnodes=options.nnodes,
            rdzv_endpoint=options.rdzv_endpoint,
            node_rank=options.node_rank,
            secret_file=options.secret_file,
            comfy_flags=comfy_flags,
            parent=None if options.started_by is None else Parent.from_text(options.started_by),
        )
    )


def _demo(options: argparse.Namespace, comfy_flags: list[str]) -> int:
    from .demo import demo

    return demo(device=options.device, output=options.output, checkpoint=options.checkpoint)


def _status(options: argparse.Namespace, comfy_flags: list[str]) -> int:
    from .status import status

    return status()


def _logs(options: argparse.Namespace, comfy_flags: list[str]) -> int:
    from .status import logs

    return logs(options.rank, options.lines)


def _doctor(options: argparse.Namespace, comfy_flags: list[str]) -> int:
    from .doctor import doctor
    from .shipped_models import complete_folder

    return doctor(None if options.model is None else complete_folder(options.model))


_COMMANDS = {"up": _up, "demo": _demo, "status": _status, "logs": _logs, "doctor": _doctor}
