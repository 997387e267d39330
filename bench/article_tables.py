"""One Markdown table for each part of ``phase-parallel bench article``. Rows that are missing stand in it with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .article_aims import worst
from .article_results import Results

Rows = list[list[Any]]
NODE_NOTES = (
    "What differs: in ComfyUI each step is a call by the stock sampler, in which rank 0 asks the others, agrees with them on the result,",
    "and draws and sends a preview; the picture lies behind a prompt of 1,251 tokens (toy sizes: 156), that of `bench e2e` behind prompt and",
    "text; and with the VAE goes the PNG file.",
    "",
    "TI2I is not measured through ComfyUI.",
)


def cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    lines = ["| " + " | ".join(headers) + " |", "|" + "---|" * len(headers)]
    return [*lines, *("| " + " | ".join(map(cell, row)) + " |" for row in rows)]


def spread(ms: Mapping[str, float], digits: int = 2) -> str:
    """The slowest rank's median, and the extremes."""
    return f"{worst(ms):.{digits}f} ({ms['minimum']:.{digits}f} … {ms['maximum']:.{digits}f})"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else ""


def missing_rows(results: Results, part: str, columns: int) -> Rows:
    return [[call.title, why, *[""] * (columns - 2)] for call, why in results.missing(part)]


def ar_table(results: Results) -> list[str]:
    headers = ("plan", "task", "prompt", "prefill, ms", "its kernels, ms", "fastest way to write", "a token, ms", "floor, ms", "of the floor")
    rows: Rows = []
    for name in results.of_part("ar"):
        decode = results.rows(name, "decode")
        for prefill in results.rows(name, "prefill"):
            fastest = min((row for row in decode if row["task"] == prefill["task"]), key=lambda row: worst(row["ms_per_token"]), default=None)
            written = ["", "", "", ""]
            if fastest is not None:
                ms, floor = fastest["ms_per_token"], fastest["floor_ms_per_token"]
                written = [f"{fastest['decode']}, {fastest['reduction']}", spread(ms, 3), f"{floor:.2f}", percent(floor, worst(ms))]
            title = results.found[name]["article"]["title"]
            rows.append([title, prefill["task"], prefill["tokens"], spread(prefill["ms_prefill"]), f"{prefill['ms_device']:.2f}", *written])
    return table(headers, [*rows, *missing_rows(results, "ar", len(headers))])


def denoise_table(results: Results) -> list[str]:
    headers = ("plan", "task", "experts", "guidance", "launched", "a step, ms", "kernels, ms", "floor, ms", "of the floor", "peak GB")
    rows: Rows = []
    for name in results.of_part("denoise"):
        fastest: dict[tuple[str, ...], dict[str, Any]] = {}
        for row in results.rows(name):
            key = (row["scheme"], row["task"], row["moe"], row["cfg"])
            if key not in fastest or worst(row["ms_per_step"]) < worst(fastest[key]["ms_per_step"]):
                fastest[key] = row
        for row in fastest.values():
            ms = row["ms_per_step"]
            share = percent(row["floor_ms"], worst(ms))
            values = [spread(ms), f"{row['ms_device']:.1f}", f"{row['floor_ms']:.1f}", share, f"{row['peak_gb']:.1f}"]
            rows.append([row["plan"], row["task"], row["moe"], row["cfg"], f"{row['launch']}, {row['reduction']}", *values])
        for row in results.found[name]["rows"]:
            if "not_run" in row:
                rows.append([row["scheme"], row["task"], row["moe"], f"not run: {row['not_run']}", *[""] * 6])
    return table(headers, [*rows, *missing_rows(results, "denoise", len(headers))])


def e2e_table(results: Results) -> list[str]:
    headers = ("plan", "task", "whole, s", "prefill, ms", "tokens", "a token, ms", "switch, ms", "steps", "a step, ms", "VAE, s", "peak GB", "ranks equal")
    rows: Rows = []
    for name in ("e2e-tp", "e2e-tp2sp2", "e2e-hybrid"):
        for row in results.rows(name):
            whole = f"{row['e2e_s']:.2f} ({min(row['e2e_s_of_repeats']):.2f} … {max(row['e2e_s_of_repeats']):.2f})"
            times = [f"{row['ms_prefill']:.1f}", row["text_tokens"], f"{row['ms_per_token']:.3f}", f"{row['switch_ms']:.2f}", row["steps"]]
            alike = "yes, every time" if row["repeats_alike"] else "yes, but not every time the same picture"
            rows.append([row["plan"], row["task"], whole, *times, f"{row['ms_per_step']:.1f}", f"{row['vae_s']:.3f}", f"{row['peak_gb']:.1f}", alike])
    lines = table(headers, [*rows, *missing_rows(results, "e2e", len(headers))])
    vae = results.rows("vae")
    if vae:
        headers = ("VAE", "picture", "by", "ms", "peak GB beside the weights")
        lines += ["", *table(headers, [[r["direction"], f"{r['height']}x{r['width']}", r["way"], spread(r["ms"], 1), f"{r['peak_gb']:.2f}"] for r in vae])]
    return lines


def node_table(results: Results) -> list[str]:
    rows: Rows = []
    text, picture = results.found.get("node-text"), results.found.get("node-picture")
    benched = next((row for name in ("e2e-hybrid", "e2e-tp") for row in results.rows(name) if row["task"] == "t2i"), None)

    def against(value: float, bench: float | None) -> list[str]:
        return ["", ""] if bench is None else [f"{bench:.3f}", f"{value - bench:+.3f} ({100 * (value / bench - 1):+.1f} %)"]

    def add(what: str, value: float, bench: float | None) -> None:
        rows.append([what, f"{value:.3f}", *against(value, bench)])

    if text is not None:
        add("a token, as the page sees it, ms", text["ms_per_token_websocket"]["median"], benched and benched["ms_per_token"])
        add("first token, ms", sorted(run["first_token_ms"] for run in text["runs"])[len(text["runs"]) // 2], benched and benched["ms_prefill"])
    if picture is not None:
        run = sorted(picture["runs"], key=lambda run: run["picture_s"])[len(picture["runs"]) // 2]
        add("from step to step, ms", picture["ms_per_step_page"]["median"], benched and benched["median_ms_per_step"])
        add("the sampler by steps, ms", picture["ms_per_step_whole"]["median"], benched and benched["ms_per_step"])
        add("before the sampler, s", run["before_sampler_s"], None)
        add("first step with its prefix, ms", run["first_step_ms"], benched and 1e3 * benched["parts_s"]["prefix"] + benched["ms_per_step"])
        add("VAE, file and metadata, s", run["decode_and_save_s"], benched and benched["vae_s"])
        add("picture without its text, s", picture["picture_s"], benched and sum(benched["parts_s"][part] for part in ("rows", "prefix", "denoise", "vae")))
    rows += missing_rows(results, "node", 4)
    lines = table(("in ComfyUI, T2I", "seen by the page", "bench e2e, without ComfyUI", "difference"), rows)
    for name, result in (("text", text), ("picture", picture)):
        if result is not None and result["cancel_ms"]:
            times, ms = len(result["cancel_ms"]["all"]), spread(result["cancel_ms"], 1)
            lines += ["", f"Cancelled {times} times while making a {name}: {ms} ms, each time with a prompt behind it that worked."]
    return [*lines, "", *NODE_NOTES]


def load_table(results: Results) -> list[str]:
    headers = ("what", "files", "s", "GB/s of the checkpoint", "from the disk", "device peak of each rank, GB", "host peak of each, GB", "before")
    found = results.found.get("load")
    if found is None:
        return table(headers, missing_rows(results, "load", len(headers)))
    whole = found["checkpoint_bytes"]

    def line(what: str, files: str, part: dict[str, Any]) -> list[str]:
        came = "not counted" if part["from_disk_bytes"] is None else percent(part["from_disk_bytes"], whole)
        keys = ("device_peak_of_ranks", "host_peak_of_ranks", "host_before_of_ranks")
        peaks = [" / ".join(f"{peak / 1e9:.2f}" for peak in part.get(key, [])) for key in keys]
        return [what, files, f"{part['seconds']:.2f}", f"{whole / part['seconds'] / 1e9:.2f}", came if files else "", *peaks]

    loads = [line("load by all ranks", part["files"], part) for part in found["loads"]]
    rows = [line("written by all ranks, down to the disk", "", found["writing"]), line("read by as many processes", "cold", found["disk"]), *loads]
    about = f"A checkpoint of {whole / 1e9:.2f} GB, {found['layers']} layers, {found['scheme']}; cold: dropped from the machine's memory before."
    return [about, "", *table(headers, rows)]


def switch_table(results: Results) -> list[str]:
    headers = ("plan", "median, ms", "of repeats, ms", "weights at their addresses", "GB", "bytes of weights moved", "most allocated meanwhile, bytes", "ranks")
    rows: Rows = []
    for row in results.rows("switch"):
        switch, times = row["switch"], ", ".join(f"{ms:.2f}" for ms in row["switch_ms_of_repeats"])
        meanwhile = switch["allocated_most"] - switch["allocated_before"]
        same = [switch["tensors"], f"{switch['weight_bytes'] / 1e9:.2f}", switch["moved_bytes"], meanwhile, f"bit-identical, picture {row['digest'][:8]}"]
        rows.append([row["plan"], f"{row['switch_ms']:.2f}", times, *same])
    return table(headers, [*rows, *missing_rows(results, "switch", len(headers))])


def faults_table(results: Results) -> list[str]:
    headers = ("killed in", "rank", "its user reads why after, s", "all ranks back after, s", "next prompt, s", "its result", "what the user reads")
    rows = [
        [
            row["phase"], row["rank"], f"{row['told_s']:.2f}", f"{row['back_s']:.2f}", f"{row['next_prompt_s']:.2f}",
            "as before" if row["same_result"] else "**another**", row["sentence"],
        ]
        for row in results.rows("faults")
    ]  # fmt: skip
    lines = table(headers, [*rows, *missing_rows(results, "faults", len(headers))])
    found = results.found.get("faults")
    return lines if found is None else [f"A small random model, {found['collectives']}; a launch of `phase-parallel up`.", "", *lines]


def published_table(results: Results) -> list[str]:
    headers = ("system", "setting", "task", "prefill, ms", "a token, ms", "a step, ms", "whole, s", "note")
    by_source: dict[str, Rows] = {}
    for row in results.rows("published"):
        values = ["" if row[key] is None else f"{row[key]:g}" for key in ("ms_prefill", "ms_per_token", "ms_per_step", "e2e_s")]
        source = f"{row['source']}, {row['date']}; measured {row['measured']}:"
        by_source.setdefault(source, []).append([row["system"], row["setting"], row["task"], *values, row["note"]])
    lines = ["Theirs, not figures of this pack. An empty cell: no figure is known."]
    for source, rows in by_source.items():
        lines += ["", source, "", *table(headers, rows)]
    missing = missing_rows(results, "published", len(headers))
    return [*lines, *(["", *table(headers, missing)] if missing else []), "", *_ours(results)]


def _ours(results: Results) -> list[str]:
    """Our rows in the same columns, for the eye."""
    rows: Rows = []
    for name in ("e2e-tp", "e2e-tp2sp2", "e2e-hybrid"):
        for row in results.rows(name):
            values = [f"{row[key]:.2f}" for key in ("ms_prefill", "ms_per_token", "ms_per_step", "e2e_s")]
            rows.append([f"ours: {row['plan']}", row["task"], *values])
    return table(("this run", "task", "prefill, ms", "a token, ms", "a step, ms", "whole, s"), rows) if rows else []


TABLES: dict[str, Callable[[Results], list[str]]] = {
    "ar": ar_table,
    "denoise": denoise_table,
    "e2e": e2e_table,
    "node": node_table,
    "load": load_table,
    "switch": switch_table,
    "faults": faults_table,
    "published": published_table,
}
