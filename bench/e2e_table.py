"""The table of ``phase-parallel bench e2e``: whole pictures of every scheme that runs on these ranks; the slowest rank counts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..models.hunyuan_image_3.engine import Engine
from ..models.hunyuan_image_3.loading import LoadOptions, check_device_memory, kind_dtypes, trunk_dtype
from ..models.hunyuan_image_3.sharding import sharding_table
from ..parallel.checkpoint import CheckpointError
from ..parallel.cluster import Cluster
from ..parallel.collectives import Communicator
from ..parallel.plan import ParallelPlan
from ..parallel.section import SectionKey, open_section
from .ar import Task, choose_tasks
from .denoise import STEPS
from .denoise_cases import SCHEMES
from .denoise_table import Shards, free_memory
from .e2e import PARTS, Picture, Trace, WholePicture
from .environment import describe_machine
from .errors import BenchError
from .random_model import checked_options
from .release import Release, full_vocabulary, sizes
from .report import print_head, rank_words

TEXT_TOKENS = {"t2i": 750, "ti2i": 460}
SMALL_TEXT, SMALL_STEPS = 16, 2
OPTIONS = LoadOptions()
"""As the loader's node has them, and guidance with both branches in one pass."""


@dataclass(frozen=True)
class E2eOptions:
    """``schemes`` by name, all of ``ranks`` ranks. Empty ``tasks`` mean all of them."""

    alone: ClassVar[bool] = False  # a rank without its peers makes no picture

    schemes: tuple[str, ...]
    ranks: int
    tasks: tuple[str, ...]
    layers: int
    small: bool
    repeats: int
    text_tokens: int | None = None
    """Of every picture's text, else as many as the published figures are of; ``steps`` likewise."""
    steps: int | None = None


def traces(options: E2eOptions) -> list[Trace]:
    def trace(task: Task) -> Trace:
        tokens, steps = (SMALL_TEXT, SMALL_STEPS) if options.small else (TEXT_TOKENS[task.name], STEPS)
        return Trace(task, options.text_tokens or tokens, options.steps or steps)

    return [trace(task) for task in choose_tasks(options.tasks, small=options.small)]


def run_rank(options: E2eOptions, cluster: Cluster) -> dict[str, Any]:
    """Collective. All ranks must make the same text and the same picture."""
    built, device = full_vocabulary(sizes(options.layers, small=options.small)), cluster.device
    shards, rows = Shards(built, device), []
    for number, name in enumerate(options.schemes):
        plan = SCHEMES[name].on(cluster.rank)
        require_memory(built, plan, shards, device)
        with open_section(cluster, SectionKey("bench", "e2e", number, ""), plan, phase="bench") as section:
            load = checked_options(OPTIONS, device)
            model = shards.get(plan, load).model(built.config, plan, section.communicator, load, device)
            engine = Engine(model, built.tokenizer, options=load)
            for trace in traces(options):
                make = WholePicture(engine, built, trace, section)
                # The first one also compiles, connects the ranks and lets libraries choose.
                pictures = [make() for _ in range(1 + options.repeats)]
                for picture in pictures:
                    section.agree(f"text of {trace.task.name}", picture.tokens_digest)
                    section.agree(f"picture of {trace.task.name}", picture.digest)
                rows.append({"scheme": name, "plan": plan.describe(), "task": trace.task.name, **row_of(pictures, trace, section.communicator)})
                if cluster.rank == 0:  # a long run that is stopped has shown what it had
                    print(row_words(rows[-1]), file=sys.stderr, flush=True)
                engine.prefixes.clear()
                engine.denoiser.release()
                free_memory(device)
            section.exit("")
        del model, engine, make
    return {**describe_machine(device), "ranks": options.ranks, "alone": False, "layers": options.layers, "rows": rows}


def require_memory(built: Release, plan: ParallelPlan, shards: Shards, device: torch.device) -> None:
    """Raises BenchError before memory is spent where a rank cannot hold its weights beside what the last scheme has left to be dropped."""
    if shards.holds(plan, OPTIONS):
        return
    shards.drop()
    widths = {kind: dtype.itemsize for kind, dtype in kind_dtypes(trunk_dtype(built.config, OPTIONS.weight_dtype)).items()}
    need = sharding_table(built.config, plan, OPTIONS.moe_layout).bytes_resident(widths)
    try:
        check_device_memory(device, need, plan)
    except CheckpointError as error:
        raise BenchError(f"{error}.") from error


def row_of(pictures: Sequence[Picture], trace: Trace, comm: Communicator) -> dict[str, Any]:
    """Collective. The median picture as its slowest rank saw it; the first picture is no measurement."""
    mine = [[*(round(picture.seconds.get(part, 0.0) * 1e9) for part in PARTS), round(picture.median_step_ms * 1e6)] for picture in pictures]
    everyone = comm.control_gather([number for picture in mine for number in picture])
    width = len(PARTS) + 1
    slowest = [max((ns[i * width : (i + 1) * width] for ns in everyone), key=lambda values: sum(values[:-1])) for i in range(len(pictures))]
    median = sorted(slowest[1:], key=lambda values: sum(values[:-1]))[len(slowest[1:]) // 2]
    seconds = {part: ns / 1e9 for part, ns in zip(PARTS, median, strict=False)}
    last = pictures[-1]
    peaks = comm.control_gather([last.peaks.get(part, 0) for part in PARTS])
    return {
        "prompt_tokens": last.prompt_tokens,
        "text_tokens": trace.text_tokens,
        "prefix": last.prefix,
        "reused": last.reused,
        "image_tokens": last.image_tokens,
        "steps": trace.steps,
        **last.words,
        "ms_prefill": seconds["prefill"] * 1e3,
        "ms_per_token": seconds["decode"] * 1e3 / (trace.text_tokens - 1),
        "switch_ms": seconds["switch"] * 1e3,
        "switch_ms_of_repeats": [values[PARTS.index("switch")] / 1e6 for values in slowest[1:]],
        "ms_per_step": seconds["denoise"] * 1e3 / trace.steps,
        "median_ms_per_step": median[-1] / 1e6,
        "steps_ms": [round(ms, 3) for ms in last.step_ms],
        "vae_s": seconds["vae"],
        "e2e_s": sum(seconds.values()),
        "parts_s": seconds,
        "e2e_s_of_repeats": [sum(values[:-1]) / 1e9 for values in slowest[1:]],
        "first_e2e_s": sum(slowest[0][:-1]) / 1e9,
        "peak_gb": max(max(values) for values in peaks) / 1e9,
        "peak_gb_of_ranks": [max(values) / 1e9 for values in peaks],
        "peak_gb_of_parts": {part: max(values) / 1e9 for part, values in zip(PARTS, zip(*peaks, strict=True), strict=True)},
        "switch": last.switch,
        "tokens_digest": last.tokens_digest,
        "digest": last.digest,
        "repeats_alike": len({(picture.tokens_digest, picture.digest) for picture in pictures}) == 1,
    }


def row_words(row: dict[str, Any]) -> str:
    parts = ", ".join(f"{part} {seconds:.3f}" for part, seconds in row["parts_s"].items())
    switch, alike = row["switch"], "the same" if row["repeats_alike"] else "NOT the same"
    return (
        f"{row['task']:5} {row['scheme']:17} {row['e2e_s']:8.3f} s ({min(row['e2e_s_of_repeats']):.3f} … {max(row['e2e_s_of_repeats']):.3f}, "
        f"first {row['first_e2e_s']:.1f}): prefill of {row['prompt_tokens']} {row['ms_prefill']:.1f} ms, {row['text_tokens']} tokens "
        f"{row['ms_per_token']:.3f} ms/token, switch {row['switch_ms']:.2f} ms, {row['steps']} steps {row['ms_per_step']:.2f} ms/step "
        f"(median {row['median_ms_per_step']:.2f}) behind {row['prefix']} tokens, {row['reused']} of them from the text, VAE {row['vae_s']:.3f} s\n"
        f"      seconds: {parts}\n"
        f"      peak {row['peak_gb']:.1f} GB; at the switch {switch['tensors']} weights of {switch['weight_bytes'] / 1e9:.1f} GB stayed at their addresses, "
        f"allocated {switch['allocated_before']} bytes before, {switch['allocated_after']} after, {switch['allocated_most']} at most between\n"
        f"      picture {row['digest'][:8]} on all ranks, {alike} every time; {row['moe']}; {row['decode']}; {row['reduction']}"
    )


def print_result(result: dict[str, Any]) -> None:
    print_head(f"whole pictures with guidance, {rank_words(result)}, {result['layers']} layers", result)
    for row in result["rows"]:
        print(row_words(row))
