"""One rank of test_gpu_denoise_ranks.py: two hundred steps of one picture, with a look at this rank's memory on the way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rank_pool import serve

from phase_parallel.models.hunyuan_image_3.denoise import CfgMode, Denoiser, DenoiseRow, guide
from phase_parallel.models.hunyuan_image_3.engine import Engine
from phase_parallel.models.hunyuan_image_3.loading import LoadOptions
from phase_parallel.models.hunyuan_image_3.model import StepInputs
from phase_parallel.models.hunyuan_image_3.schedule import euler_step, flow_sigmas
from phase_parallel.models.hunyuan_image_3.sequence import build_image_rows
from phase_parallel.parallel.cluster import Cluster
from phase_parallel.parallel.plan import make_plan
from phase_parallel.parallel.section import SectionKey, digest_of, open_section
from phase_parallel.parallel.store import JsonStore

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
HOST, PORT = os.environ["STORE"].split(":")
DEVICE = torch.device(os.environ["DEVICE"])
GUIDANCE = 2.5
WARM_UP = 3

torch.set_num_threads(1)
cluster = Cluster(JsonStore.tcp(HOST, int(PORT), "denoise"), rank=RANK, world_size=WORLD_SIZE, device=DEVICE, timeout_s=120.0)
cluster.start()
calls = 0


def denoise(*, folder: str, plan: dict[str, Any], mode: CfgMode, steps: int, looks: list[int]) -> dict[str, Any]:
    """The digest of the last latent, and ``memory``: allocated and reserved bytes after each number of steps in ``looks``. On a GPU a step that waits
    for it raises."""
    global calls
    calls += 1
    own = make_plan(**plan, world_size=WORLD_SIZE, rank=RANK)
    with open_section(cluster, SectionKey("prompt", "7", calls, ""), own, phase="denoise") as section:
        engine = Engine.load(Path(folder), own, section.communicator, LoadOptions(), device=DEVICE)
        denoiser = Denoiser(engine.model, engine.prefixes, cfg_mode=mode)
        side = engine.config.image_base_size
        pair = build_image_rows(
            engine.tokenizer, engine.config, prompt="a cat on a mat " * 20, system_prompt=None, cot_text=None, cond_images=(), height=side, width=side
        )
        rows = [DenoiseRow(pair.cond, "cond"), DenoiseRow(pair.uncond, "uncond")]
        shape = (1, engine.config.vae.latent_channels, side // 16, side // 16)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        sigmas = flow_sigmas(steps, 3.0).tolist()

        def step(latent: torch.Tensor, index: int) -> torch.Tensor:
            velocity = denoiser.velocity(rows, latent, StepInputs(1000.0 * sigmas[index], 1000.0 * sigmas[index + 1]))
            return euler_step(latent, guide(velocity[:1], velocity[1:], GUIDANCE), sigmas[index], sigmas[index + 1])

        for _ in range(WARM_UP):
            step(noise, 0)
        latent, memory = noise, {}
        for index in range(steps):
            with _never_waiting():
                latent = step(latent, index)
            if index + 1 in looks:
                memory[index + 1] = _memory()
        digest = digest_of({}, {"latent": latent})
        denoiser.require()
        section.exit(digest)
    return {"digest": digest, "finite": bool(latent.isfinite().all()), "memory": memory, "recorded": denoiser.records}


@contextmanager
def _never_waiting() -> Iterator[None]:
    """Within it, whatever makes the host wait for the GPU raises."""
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if DEVICE.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def _memory() -> list[int]:
    if DEVICE.type != "cuda":
        return [0, 0]
    torch.cuda.synchronize()
    return [torch.cuda.memory_allocated(), torch.cuda.memory_reserved()]


if __name__ == "__main__":
    serve({"denoise": denoise})
