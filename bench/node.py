"""``phase-parallel bench node``: the speed of text as a user of the Think / Recaption node gets it, with a whole launch and the 80B sizes.

The ranks load a folder without weights and draw random ones, so the text is noise; its speed is that of the real model. The first prompt loads and
compiles and does not count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .ar import TASKS, prompt_text
from .environment import ROOT
from .errors import BenchError
from .node_client import Graph, NodeRun, run_graph
from .node_launch import FOLDER, LIMIT_S, EqualDigests, LaunchOptions, StartLaunch, measure_in_launch, percent, print_load, read_compared
from .release import RELEASE, SMALL, Release
from .timing import Spread

WORKFLOW = ROOT / "workflows" / "api" / "t2i_think_recaption.api.json"
SPEED = re.compile(r"^AR: (.+), ([0-9.]+) tokens/s$", re.MULTILINE)
# The graph of a step is recorded behind the first token.
SKIP_TOKENS = 16
SHORT_TOKENS = 24
ATTEMPTS = 5


@dataclass(frozen=True)
class NodeOptions:
    scheme: str
    ranks: int
    device: str
    layers: int
    small: bool
    tokens: int
    repeats: int
    cancels: int
    compare: Path | None


def measure(options: NodeOptions, launch: StartLaunch, equal_digests: EqualDigests) -> dict[str, Any]:
    """Raises BenchError, and what ``launch`` and ``equal_digests`` raise."""
    expected = None if options.compare is None else bench_row(options)
    # With few token ids, one that ends the text would come soon.
    spec = replace(SMALL, vocab=16384, layers=2) if options.small else replace(RELEASE, layers=options.layers)
    task = replace(TASKS[0], tokens=TASKS[0].tokens // 8) if options.small else TASKS[0]

    async def use(url: str, built: Release) -> dict[str, Any]:
        graph, node = text_graph(prompt_text(built, task), options)
        return await _use(url, graph, node, options)

    result = measure_in_launch(options, spec, launch, equal_digests, use)
    return {**result, "task": task.name, "prompt_tokens": task.tokens, "bench": expected}


def text_graph(prompt: str, options: LaunchOptions) -> tuple[Graph, str]:
    """Loader and Think / Recaption of the published workflow, and the id of the latter."""
    whole: Graph = json.loads(WORKFLOW.read_text(encoding="utf-8"))
    kept = {key: value for key, value in whole.items() if value["class_type"] in ("HunyuanImage3Loader", "HunyuanImage3Rewrite")}
    (loader,) = (value["inputs"] for value in kept.values() if value["class_type"] == "HunyuanImage3Loader")
    (node,) = (key for key, value in kept.items() if value["class_type"] == "HunyuanImage3Rewrite")
    loader |= {"folder": FOLDER, "plan": options.scheme}
    # A fixed size, so that nothing is written behind the text; no system prompt, so that the prompt has the length of the task.
    kept[node]["inputs"] |= {"prompt": prompt, "task": "think", "size": "width x height", "system_prompt": "None"}
    return kept, node


async def _use(url: str, graph: Graph, node: str, options: NodeOptions) -> dict[str, Any]:
    seeds = iter(range(1, 1000))

    def run(tokens: int, **settings: Any) -> Awaitable[NodeRun]:
        # Another seed each time: ComfyUI does not run a node again whose inputs are the same.
        graph[node]["inputs"] |= {"max_new_tokens": tokens, "seed": next(seeds)}
        return run_graph(url, graph, node, limit_s=LIMIT_S, **settings)

    print("Loading: every rank draws its weights ...", flush=True)
    first: NodeRun = await run(SHORT_TOKENS, on_load=print_load())
    print(f"Loaded, compiled and written {SHORT_TOKENS} tokens in {first.ended_s:.1f} s", flush=True)
    runs = []
    for _ in range(options.repeats):
        runs.append(_figures(await run(options.tokens)))
        print(_line(runs[-1]), flush=True)
    cancels, after = [], []
    for _ in range(options.cancels):
        cancels.append(await _cancelled(run, options.tokens))
        after.append((await run(SHORT_TOKENS)).ended_s * 1e3)
        print(f"cancel: interrupted after {cancels[-1]:.1f} ms; next prompt of {SHORT_TOKENS} tokens in {after[-1]:.0f} ms", flush=True)
    return {
        "load_and_compile_s": first.ended_s,
        "runs": runs,
        "ms_per_token_websocket": asdict(Spread.of([run["ms_per_token_websocket"] for run in runs])),
        "ms_per_token_node": asdict(Spread.of([run["ms_per_token_node"] for run in runs])),
        "cancel_ms": asdict(Spread.of(cancels)) | {"all": cancels} if cancels else None,
        "next_prompt_ms": after,
    }


async def _cancelled(run: Callable[..., Awaitable[NodeRun]], tokens: int) -> float:
    """Milliseconds. Random weights write a token that ends the text now and then; another seed is tried then."""
    for _ in range(ATTEMPTS):
        waited = (await run(tokens, cancel_at=max(SKIP_TOKENS, tokens // 8))).cancel_ms
        if waited is not None:
            return waited
    raise BenchError(f"{ATTEMPTS} texts ended before they could be cancelled; give more --tokens")


def _figures(run: NodeRun) -> dict[str, Any]:
    found = SPEED.search(run.shown)
    if found is None:
        raise BenchError(f"the node shows no speed: {run.shown[-300:]!r}")
    return {
        "tokens": run.progress[-1][1],
        "first_token_ms": run.progress[0][0] * 1e3,
        "way": found[1],
        "node_tokens_per_s": float(found[2]),
        "ms_per_token_node": 1e3 / float(found[2]),
        "ms_per_token_websocket": run.steady_ms(SKIP_TOKENS),
        "longest_pause_ms": run.longest_pause_ms(SKIP_TOKENS),
        "messages": len(run.progress),
    }


def _line(run: dict[str, Any]) -> str:
    return (
        f"{run['tokens']} tokens, {run['way']}: node {run['node_tokens_per_s']:.1f} tokens/s = {run['ms_per_token_node']:.3f} ms/token, "
        f"websocket {run['ms_per_token_websocket']:.3f} ms/token, longest pause {run['longest_pause_ms']:.0f} ms, "
        f"first token after {run['first_token_ms']:.0f} ms"
    )


def bench_row(options: NodeOptions) -> dict[str, Any]:
    """The fastest row of ``bench ar`` for the same task. Raises BenchError when the file is of another setting."""
    assert options.compare is not None
    values = read_compared(options.compare, "bench ar", "decode")
    if (values["ranks"], values["layers"], values["alone"]) != (options.ranks, options.layers, options.ranks == 1):
        raise BenchError(f"{options.compare} is of {values['ranks']} ranks and {values['layers']} layers; run bench ar with the settings of bench node")
    rows = [row for row in values["decode"] if row["task"] == TASKS[0].name]
    best = min(rows, key=lambda row: row["ms_per_token"]["median"])
    return {"decode": best["decode"], "reduction": best["reduction"], "ms_per_token": best["ms_per_token"]["median"], "commit": values["commit"]}


def print_result(result: dict[str, Any]) -> None:
    print(f"== node, {result['scheme']}, {result['ranks']} ranks, {result['layers']} layers, {result['hardware']}, torch {result['torch']}, {result['commit']}")
    for name in ("node", "websocket"):
        spread = result[f"ms_per_token_{name}"]
        versus = f", bench ar {result['bench']['ms_per_token']:.3f}: {percent(spread['median'], result['bench']['ms_per_token'])}" if result["bench"] else ""
        print(f"{name:10} {spread['median']:8.3f} ms/token  ({spread['minimum']:.3f} … {spread['maximum']:.3f}){versus}")
    if result["cancel_ms"]:
        spread = result["cancel_ms"]
        print(f"cancel     {spread['median']:8.1f} ms  ({spread['minimum']:.1f} … {spread['maximum']:.1f}), {len(spread['all'])} times")
    print(f"all ranks hold {result['digests'][0]}")
