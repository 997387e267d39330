"""One rank of test_engine_ranks.py: the engine on real ranks, with a mistake in one rank's input."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_pool import serve

from phase_parallel.models.hunyuan_image_3.config import HunyuanImage3Config
from phase_parallel.models.hunyuan_image_3.engine import Engine, ImageRequest
from phase_parallel.models.hunyuan_image_3.loading import LoadOptions
from phase_parallel.models.hunyuan_image_3.operations import MODEL
from phase_parallel.models.hunyuan_image_3.sequence import build_image_rows
from phase_parallel.models.hunyuan_image_3.text_generation import TextRequest
from phase_parallel.models.hunyuan_image_3.token_row import TokenRow
from phase_parallel.models.hunyuan_image_3.tokenizer import HunyuanTokenizer
from phase_parallel.parallel.cluster import Cluster
from phase_parallel.parallel.operations import OperationContext, lookup
from phase_parallel.parallel.plan import make_plan
from phase_parallel.parallel.section import Section, SectionKey, digest_of, open_section
from phase_parallel.parallel.store import JsonStore

RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
HOST, PORT = os.environ["STORE"].split(":")
PROMPT = "a red kite"

torch.set_num_threads(1)
cluster = Cluster(JsonStore.tcp(HOST, int(PORT), "engine"), rank=RANK, world_size=WORLD_SIZE, device=torch.device("cpu"), timeout_s=60.0)
cluster.start()
engines: dict[str, Engine] = {}
calls = 0


def section_of(plan: dict[str, Any], phase: str, **more: Any) -> Any:
    global calls
    calls += 1
    own = make_plan(**plan, world_size=WORLD_SIZE, rank=RANK)
    return open_section(cluster, SectionKey("prompt", "7", calls, ""), own, phase=phase, **more)


def engine_in(section: Section, folder: str, plan: dict[str, Any]) -> Engine:
    key = str(sorted(plan.items()))
    if key not in engines:
        engines.clear()
        own, comm = section.communicator.plan, section.communicator
        engines[key] = Engine.load(Path(folder), own, comm, LoadOptions(), device=torch.device("cpu"))
    if engines[key].model.comm is not section.communicator:
        engines[key].connect(section.communicator)
    return engines[key]


def one_token_off(row: TokenRow) -> TokenRow:
    tokens = list(row.tokens)
    tokens[2] += 1
    return replace(row, tokens=tuple(tokens))


def picture(*, folder: str, plan: dict[str, Any], odd_token: int | None = None, odd_text: int | None = None) -> dict[str, Any]:
    """Auto size, then two denoise steps. ``odd_…``: the rank whose row or prompt differs."""
    with section_of(plan, "picture") as section:
        engine = engine_in(section, folder, plan)
        prompt = PROMPT + "s" * (odd_text == RANK)
        request = TextRequest(prompt[: len(PROMPT)] if odd_text is None else prompt[-len(PROMPT) :], None, None, "img_ratio", True, 1)
        text = engine.generate_text(request, check=section.check)
        height, width = engine.table.size(text.ratio_index)
        rows = build_image_rows(
            engine.tokenizer, engine.config, prompt=PROMPT, system_prompt=None, cot_text=None, cond_images=(), height=height, width=width
        )
        if odd_token == RANK:
            rows = replace(rows, cond=one_token_off(rows.cond))
        image = ImageRequest(rows, steps=2, guidance=4.0, flow_shift=3.0, seeds=(5,))
        latent = engine.sample(image, check=section.check)
        digest = digest_of({}, {"latent": latent})
        section.exit(digest)
    return {"digest": digest, "size": [height, width], "latent": latent.flatten()[:8].tolist()}


def autoencoder(*, folder: str, plan: dict[str, Any], height: int, cancel_at: int | None = None) -> dict[str, Any]:
    """A latent to a picture and back. ``cancel_at``: the block before which rank 0 has been told to stop."""
    blocks = 0

    def count() -> bool:
        nonlocal blocks
        blocks += 1
        return blocks - 1 == cancel_at

    with section_of(plan, "VAE decode", cancelled=count) as section:
        engine = engine_in(section, folder, plan)
        latent = torch.randn(1, engine.config.vae.latent_channels, height, 2, generator=torch.Generator().manual_seed(1))
        pixels = engine.vae_decode(latent, check=section.check)
        mean, _ = engine.vae_encode(pixels.clamp(-1, 1))
        section.exit(digest_of({}, {"pixels": pixels, "mean": mean}))
    return {"pixels": pixels.flatten().tolist(), "mean": mean.flatten().tolist()}


def addresses(engine: Engine) -> list[int]:
    tensors = list(engine.model.around.parameters())
    for weights in engine.model.weights.values():
        tensors += [weights.wte.tensor, weights.lm_head.tensor, weights.ln_f]
        for layer in weights.layers:
            tensors += [w.tensor for w in (layer.qkv_proj, layer.o_proj, layer.shared_gate_and_up, layer.shared_down)]
            tensors += [tensor for block in layer.experts for tensor in (block.w1, block.w2)]
    return [tensor.data_ptr() for tensor in tensors]


def phases(*, folder: str, plan: dict[str, Any]) -> dict[str, Any]:
    """Prefill, decode, denoise, prefill, … three times over: what moved, which groups were made, how many resident bytes were added."""
    picture(folder=folder, plan=plan)
    (engine,) = engines.values()
    before, generation, made = addresses(engine), cluster.generation, []
    real = dist.new_group
    dist.new_group = lambda *args, **more: made.append(args) or real(*args, **more)
    try:
        digests = [picture(folder=folder, plan=plan)["digest"] for _ in range(3)]
    finally:
        dist.new_group = real
    return {
        "moved": addresses(engine) != before,
        "groups": len(made),
        "generation": cluster.generation - generation,
        "digests": digests,
    }


def ways(*, folder: str, plan: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """A text and then ``runs`` (way, guidance) as rank 0 would ask for them, on an engine that is loaded for the first one: what was drawn, what the
    user was told, how often weights were loaded."""
    loads, told, digests = [], [], []
    real = Engine.load

    def load(*args: Any, **more: Any) -> Engine:
        loads.append(args)
        return real(*args, **more)

    def call(op: str, **args: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        with section_of(plan, op, report=lambda event: told.append(event["text"]) if event["kind"] == "way" else None) as section:
            own = make_plan(**plan, world_size=WORLD_SIZE, rank=RANK)
            result, tensors = lookup(f"{MODEL}.{op}")(OperationContext(cluster, section, own, cluster.device), args, {})
            section.exit(digest_of({}, tensors))
        return result, tensors

    text = {"prompt": PROMPT, "system_prompt": None, "cot_text": None, "task": "img_ratio", "image_size": "auto", "max_new_tokens": 1}
    Engine.load = load
    try:
        call("unload")
        size, _ = call("generate_text", engine={"folder": folder}, **text)
        config = HunyuanImage3Config.from_folder(folder)
        rows = build_image_rows(
            HunyuanTokenizer.from_folder(folder, config), config, prompt=PROMPT, system_prompt=None, cot_text=None, cond_images=(),
            height=size["height"], width=size["width"],
        )  # fmt: skip
        asked = {"cond": rows.cond.to_json(), "uncond": rows.uncond.to_json(), "height": rows.height, "width": rows.width}
        asked |= {"ratio_index": rows.ratio_index, "steps": 2, "flow_shift": 3.0, "seeds": [5]}
        for run in runs:
            digests.append(digest_of({}, call("sample", engine={"folder": folder}, **asked, **run)[1]))
        groups = cluster.record.to_json()["groups"]["denoise"]
        call("unload")
    finally:
        Engine.load = real
    return {"digests": digests, "told": told, "loads": len(loads), "generation": cluster.generation, "groups": groups}


if __name__ == "__main__":
    serve({"picture": picture, "phases": phases, "autoencoder": autoencoder, "ways": ways})
