"""The ranks of ``phase-parallel judge``: an SPMD program without ComfyUI, one process per rank."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..models.hunyuan_image_3.engine import Engine
from ..models.hunyuan_image_3.loading import LoadOptions
from ..parallel.cluster import Cluster
from ..parallel.plan import ParallelPlan, make_plan
from ..parallel.section import Section, SectionKey, open_section
from ..train.contact_sheet import Entry, contact_sheet
from ..train.evaluation import Outcome, Row, evaluate
from ..train.figures import MAIN, figures, grouped, language_gap
from ..train.painter import Painter, Steps
from ..train.suites import DISTIL_STEPS, Suite, suite_items
from .errors import LaunchError
from .spmd import joined, start_ranks

TIMEOUT_S = 300.0
ON_A_SHEET = 24
REPORTS = 10
"""Lines about a suite under way."""


def start(options: dict[str, Any]) -> None:
    """Run all suites on ``options["ranks"]`` processes and return when they have ended."""
    if options["ranks"] == 1:
        _examine(options, Cluster.alone(torch.device("cuda:0" if options["device"] == "cuda" else "cpu")))
        return
    start_ranks(["judge"], options)


def rank(written: Path) -> None:
    """Entry of one process; the elastic agent has set its rank. ``written``: the options as JSON."""
    options = json.loads(written.read_text())
    with joined(options, name="judge", timeout_s=TIMEOUT_S) as cluster:
        _examine(options, cluster)


def _examine(options: dict[str, Any], cluster: Cluster) -> None:
    try:
        _run(options, cluster)
    except (ValueError, RuntimeError) as error:  # of the checkpoint, the device or a peer; the sentence is for the user
        raise LaunchError(f"{options['checkpoint']} could not be examined: {error}") from error


def _run(options: dict[str, Any], cluster: Cluster) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    plan = make_plan(
        options["plan"], world_size=options["ranks"], rank=cluster.rank, denoise=options["denoise"], attention=options["attention"]
    )
    engine: Engine | None = None
    found: dict[str, Any] = {name: options[name] for name in ("count", "device", "steps", "guidance")}
    found |= {"checkpoint": Path(options["checkpoint"]).name, "plan": plan.describe(), "torch": torch.__version__, "suites": {}}
    entries: list[Entry] = []
    for number, suite in enumerate(options["suites"]):
        began = time.perf_counter()
        with open_section(cluster, SectionKey("judge", suite, number, ""), plan, phase="judge") as section:
            engine = _engine(engine, options, plan, section, cluster.device)
            outcome = _suite(options, suite, engine, section, judging=cluster.rank == 0)
            section.exit(outcome.digest)
        if cluster.rank == 0:
            groups = {name: {"items": count, "figures": values} for name, (count, values) in grouped(outcome.rows).items()}
            rows = [row.to_json() for row in outcome.rows]
            found["suites"][suite] = {
                "groups": groups,
                "language_gap": language_gap(suite, outcome.rows),
                "seconds": time.perf_counter() - began,
                "rows": rows,
            }
            entries += sheet_entries(outcome)
    if cluster.rank == 0:
        if options["sheet"] is not None:
            contact_sheet(entries[:ON_A_SHEET], f"{found['checkpoint']}, {plan.describe()}").save(options["sheet"])
        Path(options["out"]).write_text(json.dumps(found), encoding="utf-8")


def _engine(engine: Engine | None, options: dict[str, Any], plan: ParallelPlan, section: Section, device: torch.device) -> Engine:
    if engine is None:
        return Engine.load(options["checkpoint"], plan, section.communicator, LoadOptions("fp32"), device=device)
    if engine.model.comm is not section.communicator:
        engine.connect(section.communicator)
    return engine


def _suite(options: dict[str, Any], suite: Suite, engine: Engine, section: Section, *, judging: bool) -> Outcome:
    steps = options["steps"] or (DISTIL_STEPS if suite == "distil" else None)
    painter = Painter(
        engine, Path(options["checkpoint"]), Steps.of(engine.config, steps=steps, guidance=options["guidance"]), check=section.check
    )
    return evaluate(painter, suite_items(suite, options["count"]), judging=judging, report=_Progress(suite, options["count"]))


class _Progress:
    """Prints the main figure so far, now and then."""

    def __init__(self, suite: Suite, count: int) -> None:
        self._suite, self._count = suite, count
        self._rows: list[Row] = []
        self._began = time.perf_counter()

    def __call__(self, row: Row) -> None:
        self._rows.append(row)
        done = len(self._rows)
        if done * REPORTS // self._count > (done - 1) * REPORTS // self._count:
            main = figures(self._rows)[MAIN[self._suite]]
            print(f"{self._suite} {done} of {self._count}: {MAIN[self._suite]} {main:.1f} %, {time.perf_counter() - self._began:.0f} s", flush=True)


def sheet_entries(outcome: Outcome) -> list[Entry]:
    """The pictures of a suite with what was seen in them."""
    pairs: list[tuple[Row, np.ndarray]] = [(row, pixels) for row, pixels in zip(outcome.rows, outcome.pictures, strict=True) if pixels is not None]
    return [
        Entry(pixels, row.item.meaning, row.item.language, row.item.suite, row.seen, row.picture.exact, row.item.wish.pictures)
        for row, pixels in pairs
        if row.picture is not None
    ]
