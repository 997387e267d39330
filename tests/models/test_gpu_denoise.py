"""Denoise steps on a GPU: replays are the steps themselves bit by bit, nothing waits for the device, memory stays flat, errors are those of bfloat16.
Skipped where there is no CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from specs import PICTURES_ON_GPUS

from phase_parallel.models.hunyuan_image_3.denoise import CfgMode, Denoiser, DenoiseRow, StepTrace, guide, sample
from phase_parallel.models.hunyuan_image_3.engine import Engine
from phase_parallel.models.hunyuan_image_3.loading import LoadOptions
from phase_parallel.models.hunyuan_image_3.model import StepInputs
from phase_parallel.models.hunyuan_image_3.schedule import euler_step, flow_sigmas
from phase_parallel.models.hunyuan_image_3.sequence import ImageRows, build_image_rows
from phase_parallel.models.hunyuan_image_3.synthetic import write_checkpoint
from phase_parallel.models.hunyuan_image_3.vae_memory import free_bytes
from phase_parallel.parallel.collectives import Communicator
from phase_parallel.parallel.groups import ProcessGroups
from phase_parallel.parallel.plan import make_plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GUIDANCE = 2.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpu") / "checkpoint"
    write_checkpoint(path, PICTURES_ON_GPUS)
    return path


def load(folder: Path, dtype: str = "bf16", kernels: str = "auto") -> Engine:
    plan = make_plan("single", world_size=1)
    comm = Communicator(plan, ProcessGroups(plan, {}, None, "nccl"))
    return Engine.load(folder, plan, comm, LoadOptions(weight_dtype=dtype, kernels=kernels), device=torch.device("cuda"))


def rows_of(engine: Engine, prompt: str = "a cat on a mat " * 20) -> ImageRows:
    return build_image_rows(
        engine.tokenizer, engine.config, prompt=prompt, system_prompt=None, cot_text=None, cond_images=(), height=512, width=512
    )


def noise_of(engine: Engine) -> torch.Tensor:
    return torch.randn(1, PICTURES_ON_GPUS.latent_channels, 32, 32, generator=torch.Generator().manual_seed(1)).to(engine.model.device)


def draw(denoiser: Denoiser, engine: Engine, steps: int) -> list[torch.Tensor]:
    """The latent and both velocities of every step, as they are at the end."""
    rows, found = rows_of(engine), []

    def keep(index: int, step: StepTrace) -> None:
        found.extend((step.pred_cond, step.pred_uncond))

    return [sample(denoiser, rows.cond, rows.uncond, noise_of(engine), flow_sigmas(steps, 3.0), guidance=GUIDANCE, trace=keep), *found]


class Stepper:
    """A call is one guided step of one picture."""

    def __init__(self, engine: Engine, denoiser: Denoiser):
        rows = rows_of(engine)
        self._rows = [DenoiseRow(rows.cond, "cond"), DenoiseRow(rows.uncond, "uncond")]
        self._denoiser, self._latent = denoiser, noise_of(engine)

    def __call__(self) -> torch.Tensor:
        velocity = self._denoiser.velocity(self._rows, self._latent, StepInputs(700.0))
        return euler_step(self._latent, guide(velocity[:1], velocity[1:], GUIDANCE), 0.7, 0.6)


@pytest.mark.parametrize("mode", ["batched", "serial"])
def test_replays_equal_launches_bit_by_bit(folder: Path, mode: CfgMode) -> None:
    engine = load(folder)
    assert engine.denoiser.records
    want = draw(Denoiser(engine.model, engine.prefixes, cfg_mode=mode, graphs=False), engine, 6)
    assert all(torch.isfinite(tensor).all() for tensor in want)
    got = draw(Denoiser(engine.model, engine.prefixes, cfg_mode=mode), engine, 6)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_replays_read_the_prefix_of_their_own_rows(folder: Path) -> None:
    """Two texts in turn; a graph that read another one's cache or tables would draw another picture."""
    engine = load(folder)
    plain = Denoiser(engine.model, engine.prefixes, graphs=False)
    texts = [[DenoiseRow(rows_of(engine, prompt).cond, "cond")] for prompt in ("a cat", "a dog on a very long red sofa")]
    want = [plain.velocity(rows, noise_of(engine), StepInputs(700.0)) for rows in texts]
    for _ in range(3):
        for rows, velocity in zip(texts, want, strict=True):
            assert torch.equal(engine.denoiser.velocity(rows, noise_of(engine), StepInputs(700.0)), velocity)


@pytest.mark.parametrize("mode", ["batched", "serial"])
@pytest.mark.parametrize("graphs", [True, False], ids=["replayed", "launched"])
def test_step_does_not_synchronise(folder: Path, graphs: bool, mode: CfgMode) -> None:
    engine = load(folder)
    step = Stepper(engine, Denoiser(engine.model, engine.prefixes, cfg_mode=mode, graphs=graphs))
    for _ in range(3):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(200):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("graphs", [True, False], ids=["replayed", "launched"])
def test_memory_is_flat_over_two_hundred_steps(folder: Path, graphs: bool) -> None:
    engine = load(folder)
    step = Stepper(engine, Denoiser(engine.model, engine.prefixes, graphs=graphs))
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(200):
        step()
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


def test_release_gives_the_memory_back(folder: Path) -> None:
    """Libraries keep the workspaces that they got for the first graph, hence the second one."""
    engine = load(folder)
    step, reserved = Stepper(engine, engine.denoiser), []
    for _ in range(3):
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
        engine.denoiser.release()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[2:4] == reserved[4:6] and reserved[3] < reserved[2]


def test_the_vae_is_not_promised_what_recorded_steps_keep(folder: Path) -> None:
    engine = load(folder)
    step = Stepper(engine, engine.denoiser)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    reserved, free = torch.cuda.memory_reserved(), free_bytes(engine.model.device)
    engine.denoiser.release()
    torch.cuda.empty_cache()
    kept = reserved - torch.cuda.memory_reserved()
    # The driver moves a few MB by itself.
    assert kept > 0 and free_bytes(engine.model.device) - free >= 0.9 * kept


def test_errors_are_those_of_bfloat16(folder: Path) -> None:
    """Velocities against fp32 on the same weights: fused kernels are no further away than 1.5 times the eager bfloat16 path."""
    engine = load(folder, "fp32", "eager")
    exact = draw(engine.denoiser, engine, 4)
    found = {}
    for kernels in ("eager", "auto"):
        engine = load(folder, "bf16", kernels)
        got = draw(engine.denoiser, engine, 4)
        found[kernels] = float(sum((a.float() - b).norm() / b.norm() for a, b in zip(got[1:], exact[1:], strict=True)) / (len(exact) - 1))
    print(f"distance of velocities to fp32: eager {found['eager']:.2e}, fused {found['auto']:.2e}")
    assert found["auto"] <= 1.5 * found["eager"]
