"""``phase-parallel check DIR``: every case of a golden folder through the code that the nodes use, under any plan, with real ranks.

The parent starts one process per rank (torchrun's elastic agent) and prints what rank 0 compared; ranks compare the digests of all results among
themselves, so a rank that differs in one bit is a failure too.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from ..kernels.kernel_set import KERNEL_CHOICES, MOE_BACKENDS
from ..kernels.moe import MOE_LAYOUTS, MOE_PATHS
from ..models.hunyuan_image_3.loading import REDUCTION_CHOICES, LoadOptions, check_folder
from ..models.hunyuan_image_3.token_loop import DECODE_CHOICES
from ..parallel.plan import ATTENTION_KINDS, DENOISE_KINDS, PLAN_NAMES, ParallelPlan, make_plan
from .errors import LaunchError
from .golden import GoldenCase
from .golden_spec import CaseError
from .plan_presets import PRESETS, choose_preset


@dataclass(frozen=True)
class CheckOptions:
    """One run over a folder: which cases, under which plan."""

    golden: str
    cases: tuple[str, ...]
    ranks: int
    plan: str
    denoise: str | None
    attention: str
    moe_layout: str
    moe_path: str
    cfg_mode: str
    reuse_text: bool
    device: str
    kernels: str = "auto"
    decode: str = "auto"
    reduction: str = "auto"
    moe_backend: str = "auto"

    def load_options(self) -> LoadOptions:
        return LoadOptions("fp32", self.moe_layout, self.moe_path, self.kernels, self.decode, self.reduction, self.moe_backend)

    def describe(self) -> str:
        plan = make_plan(self.plan, world_size=self.ranks, denoise=self.denoise, attention=self.attention)
        chosen = [f" · {name} {getattr(self, name)}" for name in ("kernels", "moe_backend", "decode", "reduction") if getattr(self, name) != "auto"]
        return f"{plan.describe()} · {self.moe_layout} {self.moe_path} · CFG {self.cfg_mode}{''.join(chosen)}"


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--as-rank"]:  # how `start` calls this program for each rank
        from .check_ranks import rank

        rank(Path(arguments[1]))
        return 0
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, _interrupt)  # so that the temporary folder goes too
    golden = Path(options.golden)
    runs = [_run_options(options, preset) for preset in (options.plan or ["single"])]
    cases = select_cases(golden, options.case)
    results = []
    for run in runs:
        run = replace(run, cases=tuple(cases))
        print(f"== {run.describe()}")
        for row in checked_rows(run):
            results.append(row)
            print_row(row, brief=options.brief)
    return summarise(results, expected=len(runs) * len(cases))


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def checked_rows(run: CheckOptions) -> list[dict]:
    """Rows of all cases in order. What one process can see to be wrong (a case, a checkpoint, a plan that does not fit) starts no rank."""
    refused: dict[str, dict] = {}
    checkpoints: dict[Path, str] = {}
    plan = make_plan(run.plan, world_size=run.ranks, denoise=run.denoise, attention=run.attention)
    for name in run.cases:
        try:
            checkpoint = GoldenCase.read(Path(run.golden) / "cases" / name).checkpoint
            if checkpoint not in checkpoints:
                checkpoints[checkpoint] = _why_not(checkpoint, plan, run.load_options())
            reason = checkpoints[checkpoint]
        except CaseError as error:
            reason = str(error)
        if reason:
            refused[name] = {"case": name, "error": reason, "tensors": []}
    good = tuple(name for name in run.cases if name not in refused)
    rows = {row["case"]: row for row in (run_on_ranks(replace(run, cases=good)) if good else [])}
    return [refused.get(name) or rows[name] for name in run.cases if name in refused or name in rows]


def _why_not(checkpoint: Path, plan: ParallelPlan, options: LoadOptions) -> str:
    try:
        check_folder(checkpoint, plan, options)
    except ValueError as error:
        return str(error)
    return ""


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="phase-parallel check", description="Compare this pack with every case of a golden folder.")
    parser.add_argument("golden", help="folder with cases/ and checkpoints/")
    parser.add_argument(
        "--plan",
        action="append",
        metavar="PLAN",
        help=f"{', '.join([*PRESETS, *PLAN_NAMES, 'all'])}; may be given several times (default: single, or auto for --ranks)",
    )
    parser.add_argument("--ranks", type=int, help="number of ranks for the plans tp, hybrid and replicated")
    parser.add_argument("--denoise", choices=DENOISE_KINDS)
    parser.add_argument("--attention", choices=ATTENTION_KINDS)
    parser.add_argument("--case", action="append", metavar="NAME", help="only this case; may be given several times, may hold *")
    parser.add_argument("--moe-layout", choices=MOE_LAYOUTS, default="micro_major")
    parser.add_argument("--moe-path", choices=MOE_PATHS, default="multi_micro")
    parser.add_argument("--cfg-mode", choices=("batched", "serial"), default="batched")
    parser.add_argument("--no-text-reuse", action="store_true", help="compute the denoise prefix again instead of reusing the text's keys and values")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kernels", choices=KERNEL_CHOICES, default="auto", help="of prefill and denoise (default: fused on CUDA devices)")
    parser.add_argument("--decode", choices=DECODE_CHOICES, default="auto", help="how text is written (default: graph on CUDA devices)")
    parser.add_argument("--reduction", choices=REDUCTION_CHOICES, default="auto", help="with --decode graph: how a step adds up the ranks' parts")
    # FlashInfer's experts take no fp32 weights, and everything is compared in fp32 here.
    backends = [name for name in MOE_BACKENDS if name != "flashinfer"]
    parser.add_argument("--moe-backend", choices=backends, default="auto", help="who computes the experts (default: as --kernels)")
    parser.add_argument("--brief", action="store_true", help="one line per case; of the tensors only those that fail")
    options = parser.parse_args(arguments)
    if options.plan and "all" in options.plan:
        options.plan = list(PRESETS)
    if not options.plan and options.ranks and options.ranks > 1:
        options.plan = ["hybrid" if options.ranks >= 4 else "tp"]
    return options


def _run_options(options: argparse.Namespace, preset: str) -> CheckOptions:
    chosen = choose_preset(preset, options.ranks, also=("all",))
    run = CheckOptions(
        golden=options.golden,
        cases=(),
        ranks=chosen["ranks"],
        plan=chosen["plan"],
        denoise=options.denoise or chosen.get("denoise"),
        attention=options.attention or chosen.get("attention", "ulysses"),
        moe_layout=options.moe_layout,
        moe_path=options.moe_path,
        cfg_mode=options.cfg_mode,
        reuse_text=not options.no_text_reuse,
        device=options.device,
        kernels=options.kernels,
        decode=options.decode,
        reduction=options.reduction,
        moe_backend=options.moe_backend,
    )
    try:
        run.describe()
        if run.device == "cpu":  # this process leaves GPUs to its ranks
            run.load_options().check_device(torch.device("cpu"))
    except ValueError as error:
        raise LaunchError(f"{error}.") from error
    return run


def select_cases(golden: Path, patterns: list[str] | None) -> list[str]:
    folder = golden / "cases"
    # A folder without case.json is a damaged case, not something to pass over.
    names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if not names:
        raise LaunchError(f"{golden} holds no cases; give a folder with cases/<name>/case.json and checkpoints/.")
    if not patterns:
        return names
    chosen = [name for name in names if any(Path(name).match(pattern) for pattern in patterns)]
    if not chosen:
        raise LaunchError(f"No case of {golden} is called {' or '.join(patterns)}; there are {', '.join(names)}.")
    return chosen


def run_on_ranks(run: CheckOptions) -> list[dict]:
    """All cases of ``run``; one JSON row per case, written by rank 0."""
    from .check_ranks import start

    with tempfile.TemporaryDirectory(prefix="phase-parallel-check-") as folder:
        out = Path(folder) / "results.jsonl"
        start({**asdict(run), "cases": list(run.cases), "out": str(out)})
        return [json.loads(line) for line in out.read_text().splitlines()] if out.is_file() else []


def print_row(row: dict, *, brief: bool) -> None:
    """One line for the case, then one for each tensor: its largest relative error, its limit, ok or FAIL."""
    if row.get("error"):
        print(f"{row['case']:38} FAIL  {row['error']}")
        return
    tensors = row["tensors"]
    worst = max((t["error"] for t in tensors), default=0.0)
    verdict = "ok" if all(t["ok"] for t in tensors) else "FAIL"
    print(f"{row['case']:38} {len(tensors):3} tensors  worst {worst:.2e}  {verdict}  ranks {row['digest'][:12]}")
    for tensor in tensors:
        if not brief or not tensor["ok"]:
            word = "ok" if tensor["ok"] else "FAIL"
            print(f"    {tensor['tensor']:34} {tensor['error']:.3e}  limit {tensor['limit']:.0e}  {word} {tensor['note']}".rstrip())


def summarise(rows: list[dict], *, expected: int) -> int:
    """Last line of the output; 1 when anything failed or is missing."""
    tensors = [tensor for row in rows for tensor in row.get("tensors", [])]
    worst = max((tensor["error"] for tensor in tensors), default=0.0)
    failed = [row for row in rows if row.get("error") or not all(t["ok"] for t in row["tensors"])]
    ok = not failed and len(rows) == expected and expected > 0
    print(f"cases {len(rows)} of {expected}, tensors {len(tensors)}, worst error {worst:.2e}: {'ok' if ok else 'FAIL'}")
    return 0 if ok else 1
