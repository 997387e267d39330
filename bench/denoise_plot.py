"""``phase-parallel bench plot``: the scaling curves of results of ``bench denoise`` as one PNG."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .denoise_scaling import Point, points, predictions
from .errors import BenchError

LINES = {"measured": "-", "alone": "-", "predicted": "--"}
WORDS = {"measured": "", "alone": " (one rank + collectives)", "predicted": ""}


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def plot(files: Sequence[Path], out: Path) -> None:
    """Draws ``files`` into ``out``.

    Raises:
        BenchError: matplotlib is not installed, or a file is no result of bench denoise.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BenchError("bench plot draws with matplotlib, which is not installed; run `python -m pip install matplotlib`.") from error
    results = [read_result(file) for file in files]
    known = [point for result in results for point in points(result)]
    if not known:
        raise BenchError(f"{files[0]} holds no step with its collectives to draw; give a result of `phase-parallel bench denoise --sizes --out FILE`.")
    worlds = {(point.ranks, *point.case) for point in known}
    guessed = [point for point in predictions(results[0]) if (point.ranks, *point.case) not in worlds]
    figure = Figure(figsize=(15, 5), layout="constrained")
    FigureCanvasAgg(figure)
    by_tokens, by_prefix, by_world = figure.subplots(1, 3)
    prefix = min(point.prefix for point in known)
    tokens = sorted({point.image_tokens for point in known})[len({point.image_tokens for point in known}) // 2]
    everything = [*known, *guessed]
    _curves(by_tokens, (p for p in everything if p.prefix == prefix), lambda p: p.image_tokens, f"image tokens (prefix {prefix})")
    _curves(by_prefix, (p for p in everything if p.image_tokens == tokens), lambda p: p.prefix, f"tokens of the prefix ({tokens} image tokens)")
    _worlds(by_world, known, guessed, tokens)
    by_tokens.set_ylabel("ms of a guided step")
    head = results[0]
    figure.suptitle(
        f"{head['hardware']}, torch {head['torch']}, {head['date']}, commit {head['commit']}, {head['layers']} layers. Dashed, hollow: prediction by "
        "the arithmetic of what was measured, plus NCCL's measured times",
        fontsize=10,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)


def read_result(file: Path) -> dict[str, Any]:
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        if {"rows", "alone", "layers"} <= set(result) and all({"scheme", "prefix"} <= set(row) for row in result["rows"]):
            return result
    except (OSError, ValueError, TypeError) as error:
        raise BenchError(f"{file} cannot be read as a result of bench denoise: {error}.") from error
    raise BenchError(f"{file} is no result of bench denoise; give a file that `phase-parallel bench denoise --out FILE` wrote.")


def _curves(axes: Any, chosen: Iterable[Point], x: Callable[[Point], int], words: str) -> None:
    listed = list(chosen)
    for name in dict.fromkeys(point.scheme for point in listed):
        line = sorted((point for point in listed if point.scheme == name), key=x)
        how = line[0].how
        label = f"{name}{WORDS[how]}" + (", predicted" if how == "predicted" else "")
        axes.plot(
            [x(p) for p in line], [p.ms for p in line], LINES[how], marker="o", label=label, markerfacecolor="none" if how == "predicted" else None
        )
    axes.set_xlabel(words)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(0.0, 0.72))


def _worlds(axes: Any, known: list[Point], guessed: list[Point], tokens: int) -> None:
    """The fastest of each number of ranks for the shortest and the longest prefix, and at each number all the others as dots."""
    prefixes = sorted({point.prefix for point in known if point.image_tokens == tokens})
    for prefix in dict.fromkeys((prefixes[0], prefixes[-1])):
        here = [p for p in known if p.case == (prefix, tokens)]
        fastest = {p.ranks: p for p in sorted(here, key=lambda p: -p.ms)}
        expected = {p.ranks: p for p in guessed if p.case == (prefix, tokens)}
        line = sorted({**expected, **fastest}.values(), key=lambda p: p.ranks)
        (drawn,) = axes.plot([p.ranks for p in line], [p.ms for p in line], "--", alpha=0.5)
        colour = drawn.get_color()
        axes.plot([p.ranks for p in here], [p.ms for p in here], "o", color=colour, label=f"prefix {prefix}: all schemes")
        axes.plot(list(expected), [p.ms for p in expected.values()], "o", color=colour, markerfacecolor="none", label=f"prefix {prefix}: predicted")
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes.set_xlabel(f"ranks ({tokens} image tokens)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
