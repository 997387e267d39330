"""The aims of the article: figure, limit, and for what misses it the measured parts and what would have to go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .article_results import Results

HARDWARE = "H200"
RANKS = 4
"""What the limits are for."""
LARGEST = 5
OTHERS_KERNELS = ("flashinfer", "grouped_mm")


@dataclass(frozen=True)
class Found:
    """``split``: parts of ``value`` by name, in its unit; empty where nothing shares it."""

    value: float
    where: str
    split: Mapping[str, float]


@dataclass(frozen=True)
class Aim:
    """At most ``limit``, or with ``at_least`` no less. ``published``: LightX2V's figure on the same hardware."""

    what: str
    unit: str
    limit: float
    published: float | None
    find: Callable[[Results], Found | None]
    at_least: bool = False

    def met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


def worst(ms: Mapping[str, float]) -> float:
    """The slowest rank of a spread's median."""
    return ms.get("slowest_rank", ms["median"])


def decode_rows(results: Results) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in results.of_part("ar"):
        for row in results.rows(name, "decode"):
            yield results.found[name]["article"]["title"], row


def step_rows(results: Results) -> Iterator[dict[str, Any]]:
    """With this pack's own experts."""
    for name in results.of_part("denoise"):
        yield from filter(_ours, results.rows(name))


def _ours(row: Mapping[str, Any]) -> bool:
    return not any(library in row["moe"] for library in OTHERS_KERNELS)


def _decode(task: str) -> Callable[[Results], Found | None]:
    def find(results: Results) -> Found | None:
        rows = [(worst(row["ms_per_token"]), title, row) for title, row in decode_rows(results) if row["task"] == task]
        if not rows:
            return None
        value, title, row = min(rows, key=lambda found: found[0])
        return Found(value, f"{title}; {row['decode']}, {row['reduction']}", {k: us / 1e3 for k, us in row["split_us"].items()})

    return find


def _prefill(task: str) -> Callable[[Results], Found | None]:
    def find(results: Results) -> Found | None:
        rows = [(worst(row["ms_prefill"]), name, row) for name in results.of_part("ar") for row in results.rows(name, "prefill") if row["task"] == task]
        if not rows:
            return None
        value, name, row = min(rows, key=lambda found: found[0])
        return Found(value, results.found[name]["article"]["title"], {k: us / 1e3 for k, us in row["split_us"].items()})

    return find


def _step(task: str) -> Callable[[Results], Found | None]:
    def find(results: Results) -> Found | None:
        row = min((row for row in step_rows(results) if row["task"] == task), key=lambda row: worst(row["ms_per_step"]), default=None)
        if row is None:
            return None
        where = f"{row['plan']}; {row['moe']}, {row['cfg']}, {row['launch']}"
        return Found(worst(row["ms_per_step"]), where, {k: us / 1e3 for k, us in row["groups_us"].items()})

    return find


def _picture(task: str) -> Callable[[Results], Found | None]:
    def find(results: Results) -> Found | None:
        rows = [row for name in ("e2e-tp", "e2e-tp2sp2", "e2e-hybrid") for row in results.rows(name) if row["task"] == task]
        row = min(rows, key=lambda row: row["e2e_s"], default=None)
        return None if row is None else Found(row["e2e_s"], row["plan"], row["parts_s"])

    return find


def _switch(results: Results) -> Found | None:
    row = max(results.rows("switch"), key=lambda row: row["switch_ms"], default=None)
    return None if row is None else Found(row["switch_ms"], row["plan"], {})


def _less(results: Results, fast: list[float], slow: list[float], where: str) -> Found | None:
    """Percent that the best of ``fast`` is below the best of ``slow``."""
    return Found(100 * (1 - min(fast) / min(slow)), where, {}) if fast and slow else None


def _one_dispatch(task: str) -> Callable[[Results], Found | None]:
    def find(results: Results) -> Found | None:
        found = []
        for name in ("denoise-experts", "denoise-experts-sp"):
            rows = [row for row in results.rows(name) if row["task"] == task]
            one = [worst(row["ms_per_step"]) for row in rows if row["moe"].startswith("micro_major multi_micro") and _ours(row)]
            two = [worst(row["ms_per_step"]) for row in rows if "two_dispatch" in row["moe"]]
            found.append(_less(results, one, two, results.found[name]["article"]["title"]) if rows else None)
        return next((one for one in found if one is not None), None)

    return find


def _hybrid_token(fixed: str) -> Callable[[Results], Found | None]:
    def find(results: Results) -> Found | None:
        def best(name: str) -> list[float]:
            return [worst(row["ms_per_token"]) for row in results.rows(name, "decode") if row["task"] == "t2i"]

        return _less(results, best("ar-hybrid"), best(fixed), "a token, t2i")

    return find


def _hybrid_step(fixed: str) -> Callable[[Results], Found | None]:
    def find(results: Results) -> Found | None:
        def best(*names: str) -> list[float]:
            return [worst(row["ms_per_step"]) for name in names for row in results.rows(name) if row["task"] == "t2i"]

        return _less(results, best("denoise-cfg", "denoise-sp"), best(fixed), "a step, t2i")

    return find


AIMS: tuple[Aim, ...] = (
    Aim("a token, T2I, prompt of 1,251", "ms", 2.6, 46.333, _decode("t2i")),
    Aim("a token, TI2I, prompt of 6,290", "ms", 2.8, 45.608, _decode("ti2i")),
    Aim("prefill of 1,251", "ms", 25.0, 66.485, _prefill("t2i")),
    Aim("prefill of 6,290", "ms", 95.0, 228.162, _prefill("ti2i")),
    Aim("a guided step, T2I", "ms", 115.0, 285.096, _step("t2i")),
    Aim("a guided step, TI2I", "ms", 130.0, 336.162, _step("ti2i")),
    Aim("T2I, whole picture (750 tokens, 50 steps, VAE)", "s", 9.0, 50.041, _picture("t2i")),
    Aim("TI2I, whole picture (460 tokens, 50 steps, VAE)", "s", 9.0, 39.410, _picture("ti2i")),
    Aim("switch of phase", "ms", 5.0, None, _switch),
    Aim("multi-micro below two dispatches, T2I step", "%", 7.8, 7.8, _one_dispatch("t2i"), at_least=True),
    Aim("multi-micro below two dispatches, TI2I step", "%", 4.6, 4.6, _one_dispatch("ti2i"), at_least=True),
    Aim("hybrid below fixed TP4, a token", "%", 0.0, 2.4, _hybrid_token("ar-tp"), at_least=True),
    Aim("hybrid below fixed TP2×SP2, a token", "%", 0.0, 16.8, _hybrid_token("ar-tp2sp2"), at_least=True),
    Aim("hybrid below fixed TP4, a step", "%", 0.0, 8.3, _hybrid_step("denoise-tp"), at_least=True),
    Aim("hybrid below fixed TP2×SP2, a step", "%", 0.0, 1.2, _hybrid_step("denoise-tp2sp2"), at_least=True),
)


def why_no_verdict(results: Results) -> str:
    """Empty where the limits count: full sizes on the hardware that they are for."""
    setting = results.setting
    if setting.small:
        return "toy sizes: nothing here says how fast the model is"
    hardware = {str(result.get("hardware", "")) for result in results.measured}
    if setting.ranks != RANKS or any(HARDWARE not in name for name in hardware):
        return f"the limits are for {RANKS} × {HARDWARE}, and this is {setting.words()} ({', '.join(sorted(hardware)) or 'nothing measured'})"
    return ""


def missed(results: Results) -> list[tuple[Aim, Found]]:
    if why_no_verdict(results):
        return []
    pairs = [(aim, aim.find(results)) for aim in AIMS]
    return [(aim, found) for aim, found in pairs if found is not None and not aim.met(found.value)]


def miss_words(aim: Aim, found: Found) -> str:
    """What it is short of, the largest measured parts, and how much of them would have to go."""
    short = abs(found.value - aim.limit)
    words = f"{aim.what}: {found.value:.2f} {aim.unit} ({found.where}), {short:.2f} {aim.unit} {'below' if aim.at_least else 'above'} the aim."
    if not found.split:
        return words
    total = sum(found.split.values())
    top = sorted(found.split.items(), key=lambda part: -part[1])[:LARGEST]
    parts = ", ".join(f"{name[:40]} {value:.3g}" for name, value in top)
    rest = found.value - total
    gap = f", and {rest:.3g} {aim.unit} lie between the parts" if rest > 0.02 * found.value else ""
    share = 100 * short / found.value
    return (
        f"{words} Largest parts in {aim.unit}: {parts}; all parts together {total:.3g}{gap}. The aim is met when {share:.0f} % of the whole goes: "
        f"that is {100 * short / top[0][1]:.0f} % of the largest part."
    )
