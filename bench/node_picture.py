"""``phase-parallel bench node --task picture``: a picture as a user of the stock KSampler gets it, with a whole launch and the 80B sizes.

The published T2I graph runs from the prompt to the saved file. The ranks draw random weights, so the picture is noise; its speed is that of the real
model. The first prompt loads and compiles and does not count. The same prompt with other seeds keeps its prefix, as it does for a user; what a new
prompt costs is measured once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from .ar import TASKS, Task
from .denoise import image_prompt
from .denoise_cases import SCHEMES
from .environment import ROOT
from .errors import BenchError
from .grouped_mm_experts import GROUPED_MM
from .node_client import Graph, NodeRun, run_graph
from .node_launch import FOLDER, LIMIT_S, EqualDigests, LaunchOptions, StartLaunch, measure_in_launch, percent, print_load, read_compared
from .release import RELEASE, SMALL, Release
from .timing import Spread

WORKFLOW = ROOT / "workflows" / "api" / "t2i_ksampler.api.json"
FLAGS = ("--preview-method", "latent2rgb")
"""Of ComfyUI, as a user sets it who wants to see the picture grow."""
# The second step of a picture may be recorded, and those behind it replay it.
WARM_STEPS, SHORT_STEPS = 4, 2
WAYS = {"page": "between two steps", "whole": "sampler by steps"}


@dataclass(frozen=True)
class PictureOptions:
    scheme: str
    ranks: int
    device: str
    layers: int
    small: bool
    steps: int
    repeats: int
    cancels: int
    compare: Path | None


@dataclass(frozen=True)
class PictureGraph:
    """The published graph with the ids of the nodes that are set or timed."""

    graph: Graph
    sampler: str
    decoder: str
    prompt: str
    saver: str


def measure(options: PictureOptions, launch: StartLaunch, equal_digests: EqualDigests) -> dict[str, Any]:
    """Raises BenchError, and what ``launch`` and ``equal_digests`` raise."""
    expected = None if options.compare is None else bench_row(options)
    spec = replace(SMALL if options.small else RELEASE, layers=options.layers)
    task = replace(TASKS[0], tokens=TASKS[0].tokens // 8) if options.small else TASKS[0]

    async def use(url: str, built: Release) -> dict[str, Any]:
        return await _Session(url, picture_graph(built, task, options), options, equal_digests).measure()

    result = measure_in_launch(options, spec, launch, equal_digests, use, flags=FLAGS)
    side = spec.image_base_size
    return {**result, "task": task.name, "prefix": task.tokens, "width": side, "height": side, "bench": expected}


def picture_graph(built: Release, task: Task, options: LaunchOptions) -> PictureGraph:
    """The published workflow, with what the task fixes: a prompt of its length without a system prompt, and a square of the model's base size."""
    graph: Graph = json.loads(WORKFLOW.read_text(encoding="utf-8"))

    def only(kind: str) -> str:
        (key,) = (key for key, value in graph.items() if value["class_type"] == kind)
        return key

    found = PictureGraph(graph, only("KSampler"), only("VAEDecode"), only("PrimitiveStringMultiline"), only("SaveImage"))
    side = built.config.image_base_size
    graph[only("HunyuanImage3Loader")]["inputs"] |= {"folder": FOLDER, "plan": options.scheme}
    graph[found.prompt]["inputs"]["value"] = image_prompt(built, task)
    graph[only("HunyuanImage3Rewrite")]["inputs"] |= {"task": "off", "size": "width x height", "width": side, "height": side, "system_prompt": "None"}
    graph[only("HunyuanImage3Encode")]["inputs"]["system_prompt"] = "None"
    return found


class _Session:
    """All prompts of one launch."""

    def __init__(self, url: str, picture: PictureGraph, options: PictureOptions, equal_digests: EqualDigests):
        self._url, self._picture, self._options, self._equal_digests = url, picture, options, equal_digests
        self._seeds = iter(range(1, 1000))

    async def measure(self) -> dict[str, Any]:
        print("Loading: every rank draws its weights ...", flush=True)
        first = await self._run(WARM_STEPS, on_load=print_load())
        stages = {"load_and_compile_s": first.ended_s, "compiled": figures(first, self._picture, WARM_STEPS)}
        print(f"Loaded, compiled and drawn {WARM_STEPS} steps in {first.ended_s:.1f} s; {stage_words(stages['compiled'])}", flush=True)
        prompt = self._picture.graph[self._picture.prompt]["inputs"]
        usual = prompt["value"]
        prompt["value"] = usual[1:] + usual[:1]
        stages["new_prompt"] = figures(await self._run(SHORT_STEPS), self._picture, SHORT_STEPS)
        prompt["value"] = usual
        print(f"Another prompt of that length, {SHORT_STEPS} steps: {stage_words(stages['new_prompt'])}", flush=True)
        runs = []
        for _ in range(self._options.repeats):
            found = figures(await self._run(self._options.steps), self._picture, self._options.steps)
            runs.append(found | {"digest": (await asyncio.to_thread(self._equal_digests, self._url))[0]})
            print(_line(runs[-1]), flush=True)
        cancels, after = [], []
        for _ in range(self._options.cancels):
            cancels.append(await self._cancelled())
            after.append((await self._run(SHORT_STEPS)).ended_s * 1e3)
            print(f"cancel: interrupted after {cancels[-1]:.1f} ms; next prompt of {SHORT_STEPS} steps in {after[-1]:.0f} ms", flush=True)
        return {
            **stages,
            "runs": runs,
            "ms_per_step_page": asdict(Spread.of([run["ms_per_step_page"] for run in runs])),
            "ms_per_step_whole": asdict(Spread.of([run["ms_per_step_whole"] for run in runs])),
            "picture_s": sorted(run["picture_s"] for run in runs)[len(runs) // 2],
            "cancel_ms": asdict(Spread.of(cancels)) | {"all": cancels} if cancels else None,
            "next_prompt_ms": after,
        }

    def _run(self, steps: int, **settings: Any) -> Awaitable[NodeRun]:
        # Another seed each time: ComfyUI does not run a node again whose inputs are the same.
        self._picture.graph[self._picture.sampler]["inputs"] |= {"steps": steps, "seed": next(self._seeds)}
        return run_graph(self._url, self._picture.graph, self._picture.sampler, limit_s=LIMIT_S, **settings)

    async def _cancelled(self) -> float:
        """Milliseconds."""
        run = await self._run(self._options.steps, cancel_at=max(1, self._options.steps // 4))
        if run.cancel_ms is None:
            raise BenchError("a picture was done before it could be cancelled; give more --steps")
        return run.cancel_ms


def figures(run: NodeRun, picture: PictureGraph, steps: int) -> dict[str, Any]:
    """What the page saw of one picture. ``first_step_ms`` holds the prefix where it was computed; ``ms_per_step_page``: the median distance of two
    steps, ``ms_per_step_whole``: all of the sampler, its beginning and its end too, by the number of steps."""
    begun, decoding = run.started.get(picture.sampler), run.started.get(picture.decoder)
    saved = run.outputs.get(picture.saver, {}).get("images", [])
    if begun is None or decoding is None or not saved:
        raise BenchError("the prompt ended without a picture of its own")
    told = [(at, value) for at, value in run.progress if value > 0]
    if len(told) < 2:
        raise BenchError(f"the page was told of {len(told)} steps, too few to measure; give more --steps")
    each = sorted((b - a) * 1e3 / (n - m) for (a, m), (b, n) in pairwise(told) if n > m)
    return {
        "steps": steps,
        "messages": len(told),
        "previews": len(run.previews),
        "before_sampler_s": begun,
        "first_step_ms": (told[0][0] - begun) * 1e3,
        "ms_per_step_page": each[len(each) // 2],
        "longest_step_ms": each[-1],
        "sampler_s": decoding - begun,
        "ms_per_step_whole": (decoding - begun) * 1e3 / steps,
        "decode_and_save_s": run.ended_s - decoding,
        "picture_s": run.ended_s,
        "pictures": len(saved),
    }


def stage_words(found: dict[str, Any]) -> str:
    return (
        f"before the sampler {found['before_sampler_s']:.2f} s, prefix and first step {found['first_step_ms']:.0f} ms, "
        f"longest later step {found['longest_step_ms']:.0f} ms, VAE and file {found['decode_and_save_s']:.2f} s"
    )


def _line(run: dict[str, Any]) -> str:
    return (
        f"{run['steps']} steps: {run['ms_per_step_page']:.2f} ms between two, sampler {run['sampler_s']:.3f} s = {run['ms_per_step_whole']:.2f} ms/step, "
        f"picture in {run['picture_s']:.3f} s; {stage_words(run)}; {run['messages']} progress messages, {run['previews']} previews, "
        f"result {run['digest'][:8]} on all ranks"
    )


def bench_row(options: PictureOptions) -> dict[str, Any]:
    """The fastest row of ``bench denoise`` for the same task, plan, experts and way of guidance, as the loader has them unless told otherwise.

    Raises BenchError when the file is of another setting.
    """
    assert options.compare is not None
    values = read_compared(options.compare, "bench denoise", "rows")
    if (values["ranks"], values["layers"], values["alone"]) != (options.ranks, options.layers, options.ranks == 1):
        raise BenchError(f"{options.compare} is of {values['ranks']} ranks and {values['layers']} layers; run bench denoise with the settings of bench node")
    rows = [row for row in values["rows"] if row["task"] == TASKS[0].name and row.get("cfg") == "batched" and _as_loaded(row, options.scheme)]
    if not rows:
        raise BenchError(f"{options.compare} has no row of {TASKS[0].name}, plan {options.scheme}, micro_major multi_micro and batched guidance")
    best = min(rows, key=lambda row: row["ms_per_step"]["median"])
    return {name: best[name] for name in ("scheme", "moe", "cfg", "launch")} | {"ms_per_step": best["ms_per_step"]["median"], "commit": values["commit"]}


def _as_loaded(row: dict[str, Any], plan: str) -> bool:
    """Rows that were not run have no way of guidance. Other experts than this pack's are for comparisons."""
    ours = not row["moe"].endswith(GROUPED_MM) and "flashinfer" not in row["moe"]
    return SCHEMES[row["scheme"]].plan == plan and ours and row["moe"].startswith(("one piece", "micro_major multi_micro"))


def print_result(result: dict[str, Any]) -> None:
    print(
        f"== picture by KSampler, {result['scheme']}, {result['ranks']} ranks, {result['layers']} layers, prefix {result['prefix']}, "
        f"{result['width']}x{result['height']}, {result['steps']} steps, {result['hardware']}, torch {result['torch']}, {result['commit']}"
    )
    bench = result["bench"]
    for name, words in WAYS.items():
        spread = result[f"ms_per_step_{name}"]
        versus = f", bench denoise {bench['ms_per_step']:.2f}: {percent(spread['median'], bench['ms_per_step'])}" if bench else ""
        print(f"{words:18} {spread['median']:8.2f} ms/step  ({spread['minimum']:.2f} … {spread['maximum']:.2f}){versus}")
    if bench:
        print(f"   bench denoise: {bench['scheme']}, {bench['moe']}, {bench['cfg']}, {bench['launch']}, {bench['commit']}")
    print(f"picture            {result['picture_s']:8.3f} s")
    if result["cancel_ms"]:
        spread = result["cancel_ms"]
        print(f"cancel             {spread['median']:8.1f} ms  ({spread['minimum']:.1f} … {spread['maximum']:.1f}), {len(spread['all'])} times")
    print(f"all ranks hold {result['digests'][0]}")
