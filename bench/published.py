"""Figures that others published, or that their code was measured with: data, nothing of it measured by this pack. An empty cell: no figure is known."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

ARTICLE = "LightX2V, article on hybrid parallelism of HunyuanImage-3.0"
ARTICLE_DATE = "2026-08-17"
SETTING = "4 x H200, bf16, 1024x1024, 50 steps, with guidance"
HEAD = "LightX2V's code at f8aee98b (2026-08-21), random weights, on another 4 x H200 with a slow host"
NOT_NAMED = "not named in our notes"


@dataclass(frozen=True)
class Published:
    """``source`` published it at ``date``; ``measured`` says who measured what. Times as they are given there."""

    system: str
    setting: str
    task: str
    source: str
    date: str
    measured: str
    ms_prefill: float | None = None
    ms_per_token: float | None = None
    ms_per_step: float | None = None
    e2e_s: float | None = None
    note: str = ""


def _article(system: str, setting: str, task: str, token: float | None, step: float | None, note: str = "", **more: float) -> Published:
    return Published(system, setting, task, ARTICLE, ARTICLE_DATE, f"by its authors, {SETTING}", ms_per_token=token, ms_per_step=step, note=note, **more)


def _seen(setting: str, token: float | None, step: float | None, note: str, prefill: float | None = None) -> Published:
    return Published("LightX2V, hybrid", setting, "t2i", HEAD, "2026-11-29", "by this project, with their code", prefill, token, step, note=note)


INTEGRATION = "an integration by LightX2V that is not public"
ROWS: tuple[Published, ...] = (
    _article("LightX2V, hybrid", "one request, 750 AR tokens", "t2i", 46.333, 285.096, "AR TP4, denoise TP2xSP2", ms_prefill=66.485, e2e_s=50.041),
    _article("LightX2V, hybrid", "one request, 460 AR tokens", "ti2i", 45.608, 336.162, "AR TP4, denoise TP2xSP2", ms_prefill=228.162, e2e_s=39.410),
    _article("LightX2V, fixed TP4", "one request", "t2i", None, 310.7, "hybrid: AR 2.4 % less, a step 8.3 % less"),
    _article("LightX2V, fixed TP2xSP2", "one request", "t2i", None, 288.5, "hybrid: AR 16.8 % less, a step 1.2 % less"),
    _article("LightX2V, two dispatches by FlashInfer", "one request", "t2i", None, 309.2, "multi-micro: 7.8 % less (4.6 % with a picture)"),
    _article("FlexTP (threshold 4096)", "one request", "t2i", 53.9, 287.0, INTEGRATION),
    _article("FlexTP (threshold 4096)", "one request", "ti2i", 46.9, 337.0, INTEGRATION),
    _article("Flying Serving (arXiv 2602.22593)", "low load", "", 47.2, 310.0, INTEGRATION),
    _article("Flying Serving (arXiv 2602.22593)", "high load", "", 52.7, 451.0, f"{INTEGRATION}; several requests at once"),
    _article("Moebius (arXiv 2606.26607)", "low load", "", 46.4, 310.0, INTEGRATION),
    _article("Moebius (arXiv 2606.26607)", "high load", "", 63.4, 1805.0, f"{INTEGRATION}; several requests at once"),
    _article("ReMP (arXiv 2606.18741)", f"first of three, {NOT_NAMED}", "", 48.9, 312.0, INTEGRATION),
    _article("ReMP (arXiv 2606.18741)", f"second of three, {NOT_NAMED}", "", 115.0, 1123.0, INTEGRATION),
    _article("ReMP (arXiv 2606.18741)", f"third of three, {NOT_NAMED}", "", 110.0, 1744.0, INTEGRATION),
    _seen("wall clock, Ulysses", 105.0, 338.0, "a step: 334 to 396; bound by that host", 124.0),
    _seen("wall clock, gathered keys and values", None, 304.0, "a step: 295 to 304"),
    _seen("sum of its kernels' times", 8.0, 224.0, "what no host can beat with those kernels"),
    _seen("its pull request 1414, decode in one CUDA graph", 10.2, None, "FA3's paged decode replaced by a stand-in", 127.0),
)


def published_of(system: str, task: str) -> Published:
    """The first row of that system and task."""
    return next(row for row in ROWS if (row.system, row.task) == (system, task))


def result() -> dict[str, Any]:
    return {"rows": [asdict(row) for row in ROWS]}
