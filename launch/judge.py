"""``phase-parallel judge CHECKPOINT``: what a mini checkpoint draws for unseen wishes, looked at by rule, under any plan, with real ranks.

The parent reads the options and prints; rank 0 judges and writes what it found, and all ranks compare the digests of all texts and pictures.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..models.hunyuan_image_3.config import HunyuanImage3Config
from ..models.hunyuan_image_3.loading import LoadOptions, check_folder
from ..parallel.plan import ATTENTION_KINDS, DENOISE_KINDS, PLAN_NAMES, make_plan
from ..train.figures import GOALS, LANGUAGE_GOAL, MAIN
from ..train.mini import NAMES
from ..train.scenes import BASE_SIZE
from ..train.suites import SUITES, Suite, suites_for
from .errors import LaunchError
from .plan_presets import PRESETS, choose_preset
from .shipped_models import complete_folder, shipped_folder
from .status import table

MAXIMUM_COUNT, MAXIMUM_STEPS, MAXIMUM_GUIDANCE = 10_000, 1000, 100.0
COLUMNS = ("attributes", "exact", "kind", "colour", "size", "position", "background", "count", "recaption", "agreement", "ratio", "done")


@dataclass(frozen=True)
class JudgeOptions:
    """One run over a checkpoint. None stands for the checkpoint's own value."""

    checkpoint: str
    suites: tuple[Suite, ...]
    count: int
    ranks: int
    plan: str
    denoise: str | None
    attention: str
    device: str
    steps: int | None
    guidance: float | None
    sheet: str | None

    def describe(self) -> str:
        return make_plan(self.plan, world_size=self.ranks, denoise=self.denoise, attention=self.attention).describe()


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--as-rank"]:  # how `start` calls this program for each rank
        from .judge_ranks import rank

        rank(Path(arguments[1]))
        return 0
    words = _parse(arguments)
    options = _options(words)
    if words.out is not None:
        _check_writable(words.out)
    print(f"{Path(options.checkpoint).name}, {options.describe()}, {options.device}")
    found = run_on_ranks(options)
    for suite in options.suites:
        print(f"\n{suite_text(suite, found['suites'][suite])}")
    if words.out is not None:
        words.out.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        print(f"\nSaved {words.out} (a row for each item).")
    if options.sheet is not None:
        print(f"Saved {options.sheet}.")
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="phase-parallel judge", description="Have a mini checkpoint draw unseen scenes, and look at the pictures by rule.")
    parser.add_argument("checkpoint", help="a folder, or instruct or distil for the one that comes with this pack")
    parser.add_argument("--suite", action="append", choices=SUITES, help="may be given several times (default: those that the checkpoint is made for)")
    parser.add_argument("--count", type=int, default=20, help="items of each suite, half English, half Chinese (default 20)")
    parser.add_argument("--plan", default="single", help=f"{', '.join([*PRESETS, *PLAN_NAMES])} (default: single)")
    parser.add_argument("--ranks", type=int, help="number of ranks for the plans tp, hybrid and replicated")
    parser.add_argument("--denoise", choices=DENOISE_KINDS)
    parser.add_argument("--attention", choices=ATTENTION_KINDS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, help="of a picture (default: the checkpoint's own number; suite distil: 8)")
    parser.add_argument("--guidance", type=float, help="default: the checkpoint's own value")
    parser.add_argument("--out", type=Path, metavar="JSON", help="file for all rows and figures")
    parser.add_argument("--sheet", type=Path, metavar="PNG", help="file for a contact sheet of the first pictures")
    return parser.parse_args(arguments)


def _options(words: argparse.Namespace) -> JudgeOptions:
    """Raises LaunchError for what one process can see to be wrong: then no rank is started."""
    if not 1 <= words.count <= MAXIMUM_COUNT:
        raise LaunchError(f"--count {words.count} is not possible; choose 1 to {MAXIMUM_COUNT}.")
    if words.steps is not None and not 1 <= words.steps <= MAXIMUM_STEPS:
        raise LaunchError(f"--steps {words.steps} is not possible; choose 1 to {MAXIMUM_STEPS}.")
    if words.guidance is not None and not 1 <= words.guidance <= MAXIMUM_GUIDANCE:
        raise LaunchError(f"--guidance {words.guidance} is not possible; choose 1 (none) to {MAXIMUM_GUIDANCE:g}.")
    if words.sheet is not None:
        if words.sheet.suffix.lower() != ".png":
            raise LaunchError(f"--sheet {words.sheet} is no name of a PNG; let it end in .png.")
        _check_writable(words.sheet)
    folder = checkpoint_folder(words.checkpoint)
    chosen = choose_preset(words.plan, words.ranks)
    options = JudgeOptions(
        checkpoint=str(folder),
        suites=tuple(dict.fromkeys(words.suite or ())),
        count=words.count,
        ranks=chosen["ranks"],
        plan=chosen["plan"],
        denoise=words.denoise or chosen.get("denoise"),
        attention=words.attention or chosen.get("attention", "ulysses"),
        device=words.device,
        steps=words.steps,
        guidance=words.guidance,
        sheet=None if words.sheet is None else str(words.sheet),
    )
    try:
        plan = make_plan(options.plan, world_size=options.ranks, denoise=options.denoise, attention=options.attention)
        check_folder(folder, plan, LoadOptions("fp32"))
        suites = _suites(HunyuanImage3Config.from_folder(folder), folder, options.suites)
    except ValueError as error:
        raise LaunchError(f"{str(error).rstrip('.')}.") from error
    if options.sheet is not None and not set(suites) - {"ratio"}:
        raise LaunchError("--sheet needs a suite that draws; ratio only chooses sizes.")
    if options.device == "cuda" and torch.cuda.device_count() < options.ranks:
        raise LaunchError(f"{options.ranks} ranks need {options.ranks} CUDA devices, but {torch.cuda.device_count()} can be used; choose --device cpu.")
    return JudgeOptions(**{**asdict(options), "suites": suites})


def checkpoint_folder(word: str) -> Path:
    """The folder that a word on the command line means."""
    return shipped_folder(word) if word in NAMES else complete_folder(Path(word))


def _suites(config: HunyuanImage3Config, folder: Path, asked: tuple[Suite, ...]) -> tuple[Suite, ...]:
    if config.image_base_size != BASE_SIZE:
        raise LaunchError(f"{folder} draws pictures around {config.image_base_size} pixels, but the judge knows those of the mini model, {BASE_SIZE}.")
    if "distil" in asked and config.kind != "distil":
        raise LaunchError(f"{folder} is no distilled checkpoint, which suite distil is for; choose t2i.")
    if config.kind == "base" and (unfit := set(asked) - set(suites_for("base")) - {"distil"}):
        raise LaunchError(f"{folder} is a base checkpoint and was not trained for suite {min(unfit)}; choose {' or '.join(suites_for('base'))}.")
    return asked or suites_for(config.kind)


def _check_writable(file: Path) -> None:
    if not file.parent.is_dir() or file.is_dir():
        raise LaunchError(f"{file} cannot be written: {file.parent} must be a folder that is there, and {file.name} a file.")
    try:
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".phase-parallel-"):
            pass
    except OSError as error:
        raise LaunchError(f"{file} cannot be written ({error.strerror or error}); give a place that you may write to.") from error
    if file.exists() and not os.access(file, os.W_OK):
        raise LaunchError(f"{file} is there and cannot be written; remove it, or give another name.")


def run_on_ranks(options: JudgeOptions) -> dict[str, Any]:
    """What rank 0 found: settings, and of each suite its figures and rows."""
    from .judge_ranks import start

    with tempfile.TemporaryDirectory(prefix="phase-parallel-judge-") as folder:
        out = Path(folder) / "found.json"
        start({**asdict(options), "suites": list(options.suites), "out": str(out)})
        return json.loads(out.read_text(encoding="utf-8"))


def suite_text(suite: Suite, found: dict[str, Any]) -> str:
    """The table of a suite, then its main figure beside what it should be. Columns without a value are left out."""
    groups = found["groups"]
    shown = [name for name in COLUMNS if groups["all"]["figures"][name] is not None]
    rows = [[name, str(group["items"]), *(_cell(group["figures"][column]) for column in shown)] for name, group in groups.items()]
    lines = [table((suite, "items", *shown), rows)]
    main, goal, gap = groups["all"]["figures"][MAIN[suite]], GOALS[suite], found["language_gap"]
    words = [f"{MAIN[suite]} {main:.1f} %" + ("" if goal is None else f" (goal {goal:.0f} %)")]
    if gap is not None:
        words.append(f"English minus Chinese {gap:+.1f} points (goal: within {LANGUAGE_GOAL:.0f})")
    lines.append(f"  {suite}: {', '.join(words)}, {found['seconds']:.0f} s")
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
