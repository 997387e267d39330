"""One rank of test_step_on_two_gpus.py: steps of a picture whose sums go through peers' memory, launched and replayed, and with a peer that fails inside."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rank_pool import serve

from phase_parallel.models.hunyuan_image_3.denoise import Denoiser, DenoiseRow, StepTrace, sample
from phase_parallel.models.hunyuan_image_3.engine import Engine
from phase_parallel.models.hunyuan_image_3.loading import LoadOptions
from phase_parallel.models.hunyuan_image_3.model import StepInputs
from phase_parallel.models.hunyuan_image_3.schedule import flow_sigmas
from phase_parallel.models.hunyuan_image_3.sequence import ImageRows, build_image_rows
from phase_parallel.parallel.cluster import Cluster
from phase_parallel.parallel.faults import SectionError
from phase_parallel.parallel.plan import make_plan
from phase_parallel.parallel.section import Section, SectionKey, digest_of, open_section
from phase_parallel.parallel.store import JsonStore

RANK = int(os.environ["RANK"])
HOST, PORT = os.environ["STORE"].split(":")
DEVICE = torch.device(os.environ["DEVICE"])

torch.set_num_threads(1)
cluster = Cluster(JsonStore.tcp(HOST, int(PORT), "step"), rank=RANK, world_size=2, device=DEVICE, timeout_s=float(os.environ["TIMEOUT_S"]))
cluster.start()
engines: dict[str, Engine] = {}
calls = 0


@contextmanager
def section_with(folder: str, reduction: str = "auto") -> Iterator[tuple[Section, Engine]]:
    global calls
    calls += 1
    with open_section(cluster, SectionKey("prompt", "7", calls, ""), make_plan("tp", world_size=2, rank=RANK), phase="denoise") as section:
        comm = section.communicator
        if reduction not in engines:
            engines[reduction] = Engine.load(Path(folder), comm.plan, comm, LoadOptions(reduction=reduction), device=DEVICE)
        elif engines[reduction].model.comm is not comm:
            engines[reduction].connect(comm)
        yield section, engines[reduction]


def rows_of(engine: Engine) -> ImageRows:
    side = engine.config.image_base_size
    return build_image_rows(
        engine.tokenizer, engine.config, prompt="a cat on a mat " * 20, system_prompt=None, cot_text=None, cond_images=(), height=side, width=side
    )


def noise_of(engine: Engine) -> torch.Tensor:
    side = engine.config.image_base_size // engine.config.vae.ffactor_spatial
    return torch.randn(1, engine.config.vae.latent_channels, side, side, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def draw(engine: Engine, denoiser: Denoiser, section: Section, steps: int) -> list[torch.Tensor]:
    """The latent and both velocities of every step."""
    rows, found = rows_of(engine), []

    def keep(index: int, step: StepTrace) -> None:
        found.extend((step.pred_cond, step.pred_uncond))

    latent = sample(denoiser, rows.cond, rows.uncond, noise_of(engine), flow_sigmas(steps, 3.0), guidance=2.5, trace=keep, check=section.check)
    engine.model.comm.await_device("the picture")
    denoiser.require()
    return [latent, *found]


def pictures(*, folder: str, cfg_mode: str, steps: int) -> dict[str, Any]:
    """Digests of the same steps launched by the host and recorded, and how far the process group's are."""
    with section_with(folder) as (section, engine):
        made = {}
        for name, graphs in (("launched", False), ("recorded", True)):
            denoiser = Denoiser(engine.model, engine.prefixes, cfg_mode=cfg_mode, graphs=graphs)
            made[name] = draw(engine, denoiser, section, steps)
        reason, records = engine.model.rows_reason, denoiser.records
        denoiser.release()
    with section_with(folder, "group") as (section, engine):
        plain = Denoiser(engine.model, engine.prefixes, cfg_mode=cfg_mode)
        group = draw(engine, plain, section, steps)
        by_group = not plain.records
    distance = max(float((a - b).norm() / b.norm()) for a, b in zip(made["launched"], group, strict=True))
    digests = {name: digest_of({}, {str(i): t for i, t in enumerate(tensors)}) for name, tensors in made.items()}
    return {"digests": digests, "reason": reason, "records": records, "by_group": by_group, "distance": distance}


def quiet(*, folder: str, graphs: bool) -> dict[str, Any]:
    """Steps that may not wait for the device, and the bytes that a hundred more have left."""
    with section_with(folder) as (_, engine):
        denoiser = Denoiser(engine.model, engine.prefixes, graphs=graphs)
        rows = rows_of(engine)
        both = [DenoiseRow(rows.cond, "cond"), DenoiseRow(rows.uncond, "uncond")]
        noise = noise_of(engine)

        def step() -> None:
            denoiser.velocity(both, noise, StepInputs(700.0))

        for _ in range(3):
            step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(8):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        for _ in range(100):
            step()
        torch.cuda.synchronize()
        denoiser.require()
        after = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        denoiser.release()
    return {"grown": [b - a for a, b in zip(before, after, strict=True)]}


def picture(*, folder: str, steps: int, failing: int | None = None, standing: int | None = None, at: int = 6) -> dict[str, Any]:
    """``failing`` raises and ``standing`` stands still in front of its part of step ``at``, which the other rank has begun. ``at`` in the result: when
    this rank raised or was told, by the machine's clock."""
    result: dict[str, Any] = {}
    begun = 0
    try:
        with section_with(folder) as (section, engine):
            denoiser = engine.denoiser
            forward = denoiser._forward

            def own_part(*args: Any) -> torch.Tensor:
                nonlocal begun
                begun += 1
                if begun == at and failing == RANK:
                    time.sleep(0.5)
                    result["at"] = time.monotonic()
                    raise OSError("the disk is full")
                if begun == at and standing == RANK:
                    print("@@reply " + '{"result": "standing", "error_type": "", "error": "", "seconds": 0}', flush=True)
                    time.sleep(600)
                return forward(*args)

            denoiser._forward = own_part
            try:
                latent = draw(engine, denoiser, section, steps)[0]
            finally:
                denoiser._forward = forward
            result |= {"digest": digest_of({}, {"latent": latent}), "reason": engine.model.rows_reason, "records": denoiser.records}
    except SectionError as error:
        result = {"at": time.monotonic()} | result | {"error": str(error)}
    return result


serve({"pictures": pictures, "quiet": quiet, "picture": picture})
