"""The ranks of ``phase-parallel check``: an SPMD program without ComfyUI, one process per rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ..models.hunyuan_image_3.engine import Engine
from ..models.hunyuan_image_3.loading import LoadOptions
from ..parallel.cluster import Cluster
from ..parallel.plan import make_plan
from ..parallel.section import SectionKey, digest_of, open_section
from .golden import GoldenCase, compare, run_case
from .spmd import joined, start_ranks

TIMEOUT_S = 300.0


def start(options: dict[str, Any]) -> None:
    """Run all cases on ``options["ranks"]`` processes and return when they have ended."""
    if options["ranks"] == 1:
        device = torch.device("cuda:0" if options["device"] == "cuda" else "cpu")
        _run(options, Cluster.alone(device))
        return
    start_ranks(["check"], options)


def rank(written: Path) -> None:
    """Entry of one process; the elastic agent has set its rank. ``written``: the options as JSON."""
    options = json.loads(written.read_text())
    with joined(options, name="check", timeout_s=TIMEOUT_S) as cluster:
        _run(options, cluster)


def _run(options: dict[str, Any], cluster: Cluster) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    engines: dict[Path, Engine] = {}
    for number, name in enumerate(options["cases"]):
        row = _run_case(options, cluster, engines, name, number)
        if cluster.rank == 0:
            with open(options["out"], "a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")


def _run_case(options: dict[str, Any], cluster: Cluster, engines: dict[Path, Engine], name: str, number: int) -> dict[str, Any]:
    plan = make_plan(
        options["plan"],
        world_size=options["ranks"],
        rank=cluster.rank,
        denoise=options["denoise"],
        attention=options["attention"],
    )
    try:
        case = GoldenCase.read(Path(options["golden"]) / "cases" / name)
        with open_section(cluster, SectionKey("check", name, number, ""), plan, phase="check") as section:
            engine = engines.get(case.checkpoint)
            if engine is None:
                engines.clear()
                engine = engines[case.checkpoint] = _load(options, case, plan, section, cluster.device)
            elif engine.model.comm is not section.communicator:
                engine.connect(section.communicator)
            got = run_case(case, engine, section.check)
            digest = digest_of({}, got)
            section.exit(digest)
        rows = compare(case, got)
    except Exception as error:  # whatever a case does, it is a FAIL of that case, and the others still run
        sentence = str(error) if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__}: {error}"
        return {"case": name, "error": sentence, "tensors": []}
    return {
        "case": name,
        "digest": digest,
        "tensors": [{"tensor": r.tensor, "error": r.error, "limit": r.limit, "note": r.note, "ok": r.ok} for r in rows],
    }


def _load(options: dict[str, Any], case: GoldenCase, plan: Any, section: Any, device: torch.device) -> Engine:
    return Engine.load(
        case.checkpoint,
        plan,
        section.communicator,
        LoadOptions("fp32", *(options[name] for name in ("moe_layout", "moe_path", "kernels", "decode", "reduction", "moe_backend"))),
        device=device,
        cfg_mode=options["cfg_mode"],
        reuse_text=options["reuse_text"],
    )
