"""A whole trunk with fused operations against the same trunk with eager ones, in fp32. Ranks are threads; on a CPU the kernels are interpreted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from one_token_kernels import one_rank_at_a_time
from thread_world import run_ranks

from phase_parallel.kernels import triton_support
from phase_parallel.kernels.kernel_set import EAGER, FUSED, choose_kernels
from phase_parallel.models.hunyuan_image_3.denoise import DenoiseRow
from phase_parallel.models.hunyuan_image_3.engine import Engine
from phase_parallel.models.hunyuan_image_3.loading import LoadOptions
from phase_parallel.models.hunyuan_image_3.model import StepInputs
from phase_parallel.models.hunyuan_image_3.synthetic import SyntheticSpec, write_checkpoint
from phase_parallel.models.hunyuan_image_3.token_row import CondSpan, GenSpan, TokenRow
from phase_parallel.parallel.collectives import Communicator
from phase_parallel.parallel.plan import ParallelPlan

CPU = torch.device("cpu")
SPEC = SyntheticSpec(
    kind="instruct", hidden=32, heads=6, kv_heads=2, head_dim=12, experts=3, topk=2, expert_width=6, shared_experts=2,
    latent_channels=4, vit_layers=1,
)  # fmt: skip
# Smaller than any picture of the size table: three letters, timestep, 2 x 3 latent tokens, a separator, 1 x 2 patches and a padding, two letters.
CONDITIONAL = TokenRow(
    tokens=(*range(16), *[5] * 7), cond=(CondSpan(3, (4, 10), (2, 3), (11, 14), (1, 2)),), gen=GenSpan(16, None, None, (17, 23), (3, 2))
)
UNCONDITIONAL = TokenRow(tokens=(4, 9, 2, 6, *[5] * 7), cond=(), gen=GenSpan(4, None, None, (5, 11), (3, 2)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By the number of layers."""
    parent = tmp_path_factory.mktemp("kernel_set")
    for layers in (1, 2):
        write_checkpoint(parent / str(layers), replace(SPEC, layers=layers))
    return {layers: parent / str(layers) for layers in (1, 2)}


def run(plan: ParallelPlan, comm: Communicator, folder: Path, device: torch.device, options: LoadOptions) -> dict[str, torch.Tensor]:
    """Velocities of one guided step, after a prefix of its own; of a single rank also what the prefix left."""
    engine = Engine.load(folder, plan, comm, options, device=device)
    generator = torch.Generator().manual_seed(2)
    latent, patches, noise = (torch.randn(*shape, generator=generator).to(device) for shape in ((4, 2, 3), (3, SPEC.hidden), (1, 4, 3, 2)))
    features = (engine.model.reference_features(latent, patches, "picture"),)
    rows = [DenoiseRow(CONDITIONAL, "cond", features, 0), DenoiseRow(UNCONDITIONAL, "uncond", (), 0)]
    velocity = engine.velocity(rows, noise, StepInputs(timestep=700.0))
    found = {"velocity": velocity}
    if plan.world_size == 1:
        model, length = engine.model, CONDITIONAL.prefix_length
        kept = model.new_cache(length, "prefill")
        hidden = model.prefill(CONDITIONAL, 0, length, kept, features)
        found |= {"hidden": hidden, "logits": model.next_logits(hidden[-2:], "prefill"), "keys": kept.k, "values": kept.v}
    return {name: tensor.cpu() for name, tensor in found.items()}


# Two replicas: tensor parallel over both in the prefix, sequence parallel in the step.
PLANS = {
    "single": dict(name="single", world_size=1),
    "ulysses": dict(name="hybrid", world_size=2, storage_tp=1),
    "kv_gather": dict(name="hybrid", world_size=2, storage_tp=1, attention="kv_gather"),
}


@pytest.mark.parametrize(
    ("name", "layout", "path"),
    [
        ("single", "micro_major", "multi_micro"),
        ("ulysses", "expert_major", "multi_micro"),
        ("kv_gather", "micro_major", "two_dispatch"),
    ],
)
def test_whole_trunk(
    triton_device: torch.device, folders: dict[int, Path], name: str, layout: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_rank_at_a_time(monkeypatch)
    folder = folders[2 if name == "single" else 1]

    def ranks(kernels: str) -> list[dict[str, torch.Tensor]]:
        options = LoadOptions(moe_layout=layout, moe_path=path, kernels=kernels, decode="eager")
        return run_ranks(lambda plan, comm: run(plan, comm, folder, triton_device, options), **PLANS[name])

    for rank, (got, want) in enumerate(zip(ranks("fused"), ranks("eager"), strict=True)):
        for what, tensor in want.items():
            assert torch.isfinite(got[what]).all(), f"rank {rank}: something of {what} was not written"
            error = float((got[what] - tensor).abs().max() / tensor.abs().max())
            assert error < 2e-5, f"rank {rank}: {what} is off by {error:.1e}"


class TestChoice:
    def test_a_cpu_computes_eagerly_and_says_why(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(triton_support, "interpreting", lambda: False)
        assert choose_kernels(CPU) == (EAGER, "eager: no CUDA device")
        assert choose_kernels(CPU, "eager") == (EAGER, "eager: chosen")
        with pytest.raises(ValueError, match=r"^fused kernels cannot run here: no CUDA device; choose kernels auto or eager$"):
            choose_kernels(CPU, "fused")

    def test_the_interpreter_is_never_chosen_by_itself(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(triton_support, "interpreting", lambda: True)
        assert choose_kernels(CPU)[0] is EAGER
        assert choose_kernels(CPU, "fused")[0] is FUSED

    def test_without_triton_a_gpu_computes_eagerly(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(triton_support, "triton", None)
        assert choose_kernels(torch.device("cuda")) == (EAGER, "eager: Triton is not installed")

    def test_an_old_gpu_computes_eagerly(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(triton_support, "interpreting", lambda: False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert choose_kernels(torch.device("cuda")) == (EAGER, "eager: Triton kernels need sm_80 and this GPU is sm_75")
