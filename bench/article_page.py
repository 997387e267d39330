"""The page of ``phase-parallel bench article``: Markdown from the files of its calls, and from nothing else."""

from __future__ import annotations

from .article_aims import AIMS, miss_words, missed, why_no_verdict
from .article_results import Results
from .article_tables import TABLES, cell, table

CURVES = "curves.png"
VERSIONS = ("torch", "cuda", "nccl", "triton", "flashinfer", "python")
TITLES = {
    "ar": "Reading and writing text",
    "denoise": "A guided step",
    "e2e": "Whole pictures",
    "node": "The same through ComfyUI",
    "load": "Loading",
    "switch": "The switch of phase",
    "faults": "Killed ranks",
    "published": "What others published",
    "curves": "How a step grows",
}


def article_page(results: Results, *, drawn: str) -> str:
    """``drawn``: why there are no curves; empty where there are."""
    lines = [*head(results), *aims(results)]
    for part, title in TITLES.items():
        lines += ["", f"## {title}", ""]
        lines += TABLES[part](results) if part in TABLES else curves(results, drawn)
    return "\n".join([*lines, *misses(results), *sources(results), ""])


def head(results: Results) -> list[str]:
    measured = results.measured
    setting = results.setting

    def all_of(key: str) -> str:
        return ", ".join(dict.fromkeys(str(result[key]) for result in measured if result.get(key)))

    versions = ", ".join(f"{key} {value}" for key in VERSIONS if (value := all_of(key)))
    size = "**toy sizes: a rehearsal of the program, and no figure says how fast the model is**" if setting.small else "the full 80B sizes"
    about = f"{all_of('hardware') or setting.device}; {versions or 'nothing measured yet'}; commit {all_of('commit') or 'unknown'}; {all_of('date')}"
    return [
        "# Phase-parallel HunyuanImage-3.0: the tables",
        "",
        f"{setting.ranks} ranks on {about}.",
        f"Random weights, {size}. Medians of the slowest rank; minimum and maximum, where they stand behind, are of rank 0. Commands: at the end.",
    ]


def aims(results: Results) -> list[str]:
    reason = why_no_verdict(results)
    rows = []
    for aim in AIMS:
        found = aim.find(results)
        sign = "≥" if aim.at_least else "≤"
        met = "not measured" if found is None else "–" if reason else "yes" if aim.met(found.value) else "**no**"
        value, where = ("", "") if found is None else (f"{found.value:.2f} {aim.unit}", found.where)
        rows.append([aim.what, "" if aim.published is None else f"{aim.published:g} {aim.unit}", f"{sign} {aim.limit:g} {aim.unit}", value, met, where])
    note = ["", f"No verdict ({reason})."] if reason else []
    return ["", "## Aims", "", *table(("figure", "LightX2V, published", "aim", "here", "met", "by"), rows), *note]


def curves(results: Results, drawn: str) -> list[str]:
    lines = [f"Not drawn: {drawn}."] if drawn else [f"![A guided step by image tokens, prefix and ranks]({CURVES})", "", "Dashed, hollow: predicted."]
    missing = results.missing("curves")
    return [*lines, "", *(f"* {call.title}: {why}" for call, why in missing)]


def misses(results: Results) -> list[str]:
    found = missed(results)
    if not found:
        return []
    return ["", "## What missed its aim", "", *(f"* {miss_words(aim, what)}" for aim, what in found)]


def sources(results: Results) -> list[str]:
    rows = []
    for result in results.measured:
        block = result["article"]
        rows.append([f"`{block['command']}`", block["repeats"], f"{block['seconds']:.0f} s", result.get("commit", ""), block["date"], f"{block['name']}.json"])
    rows += [[cell(name), "", "", "", "", f"failed: {why}"] for name, why in results.failed.items()]
    return ["", "## Commands", "", *table(("command", "repeats", "took", "commit", "began", "file"), rows)]
