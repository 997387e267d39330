"""FlashInfer as the MoE backend of a whole model: with a double of it, ranks as threads, in fp32 on the CPU; and what is refused before a load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flashinfer_double import VERSION, FlashInferDouble
from one_token_kernels import few_programs, one_rank_at_a_time
from thread_world import run_ranks

from phase_parallel.kernels import kernel_set
from phase_parallel.models.hunyuan_image_3.denoise import DenoiseRow
from phase_parallel.models.hunyuan_image_3.engine import Engine
from phase_parallel.models.hunyuan_image_3.loading import LoadOptions, check_folder
from phase_parallel.models.hunyuan_image_3.model import StepInputs
from phase_parallel.models.hunyuan_image_3.synthetic import SyntheticSpec, write_checkpoint
from phase_parallel.models.hunyuan_image_3.text_generation import TextRequest
from phase_parallel.models.hunyuan_image_3.token_row import GenSpan, TokenRow
from phase_parallel.parallel.collectives import Communicator
from phase_parallel.parallel.plan import ParallelPlan, make_plan

CPU = torch.device("cpu")
SPEC = SyntheticSpec(
    kind="instruct", layers=1, hidden=32, heads=6, kv_heads=2, head_dim=12, experts=3, topk=2, expert_width=16, latent_channels=4, vit_layers=1
)
ROW = TokenRow(tokens=(4, 9, 2, 6, *[5] * 7), cond=(), gen=GenSpan(4, None, None, (5, 11), (3, 2)))
REQUEST = TextRequest("draw it", None, None, "think_recaption", need_ratio=True, max_new_tokens=3)
FLASHINFER = LoadOptions(moe_backend="flashinfer", decode="graph")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("flashinfer") / "checkpoint"
    write_checkpoint(path, SPEC)
    return path


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> FlashInferDouble:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("ranks are threads with CPU tensors; FlashInfer itself is tested in test_gpu_decode.py")
    made = FlashInferDouble()
    made.install(monkeypatch)
    monkeypatch.setattr(kernel_set, "why_not_flashinfer", lambda device, dtype: None)
    few_programs(monkeypatch)
    one_rank_at_a_time(monkeypatch)
    return made


def run(plan: ParallelPlan, comm: Communicator, folder: Path, options: LoadOptions) -> tuple[list[int], list[torch.Tensor], torch.Tensor, str]:
    """Tokens, the logits behind them, a velocity, and who is said to compute the experts."""
    engine = Engine.load(folder, plan, comm, options, device=CPU)
    trace: list[torch.Tensor] = []
    tokens = engine.generate_text(REQUEST, trace=trace.append).tokens
    noise = torch.randn(1, 4, 3, 2, generator=torch.Generator().manual_seed(2))
    velocity = engine.velocity([DenoiseRow(ROW, "cond", (), 0)], noise, StepInputs(timestep=700.0))
    return list(tokens), trace, velocity, engine.moe_words


@pytest.mark.parametrize("path", ["multi_micro", "two_dispatch"])
def test_prefill_step_and_denoise_compute_what_eager_computes(folder: Path, double: FlashInferDouble, path: str) -> None:
    """Two replicas: one micro shard in the text, both in the picture."""
    eager = replace(FLASHINFER, moe_backend="auto", decode="eager", moe_path=path)
    plan = {"name": "hybrid", "world_size": 2, "storage_tp": 1}
    wanted = run_ranks(lambda plan, comm: run(plan, comm, folder, eager), **plan)
    assert not double.calls
    found = run_ranks(lambda plan, comm: run(plan, comm, folder, replace(FLASHINFER, moe_path=path)), **plan)
    for (tokens, logits, velocity, words), (want_tokens, want_logits, want_velocity, _) in zip(found, wanted, strict=True):
        assert tokens == want_tokens
        torch.testing.assert_close(torch.stack(logits), torch.stack(want_logits), rtol=2e-4, atol=2e-4)
        torch.testing.assert_close(velocity, want_velocity, rtol=2e-4, atol=2e-4)
        assert words == f"FlashInfer {VERSION}, tuned for up to 8192 tokens"
    micro, both = (SPEC.experts, SPEC.topk), (2 * SPEC.experts, 2 * SPEC.topk)
    sizes = {micro, both} if path == "multi_micro" else {micro}
    assert (1, *micro) in double.calls, "a step of one token"
    assert {tuple(size) for _, *size in double.calls} == sizes
    assert {tuple(size) for _, *size in double.tuned} == sizes, "everything that is called was tuned"


class TestRefusals:
    def test_expert_major(self) -> None:
        with pytest.raises(ValueError, match=r"^moe_backend flashinfer needs each micro shard in one piece, but expert_major .*; choose micro_major$"):
            LoadOptions(moe_backend="flashinfer", moe_layout="expert_major")

    def test_sizes_that_it_does_not_take(self, folder: Path) -> None:
        check_folder(folder, make_plan("tp", world_size=2), FLASHINFER)
        sentence = r"^moe_backend flashinfer needs sizes in multiples of 8, and with 4 ranks one of this model's is 4; choose moe_backend auto$"
        with pytest.raises(ValueError, match=sentence):
            check_folder(folder, make_plan("tp", world_size=4), FLASHINFER)

    def test_fp32_weights_before_memory_is_spent(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """config.json says fp32, and only it knows."""
        reasons = {torch.bfloat16: None, torch.float32: "FlashInfer's experts take bfloat16 weights and these are float32"}
        monkeypatch.setattr(kernel_set, "why_not_flashinfer", lambda device, dtype: reasons[dtype])
        monkeypatch.setattr("phase_parallel.models.hunyuan_image_3.loading.allocate", lambda *arguments: pytest.fail("memory was spent"))
        options = LoadOptions(moe_backend="flashinfer")
        with pytest.raises(ValueError, match=r"^moe_backend flashinfer cannot run here: FlashInfer's experts take bfloat16 .*; or choose moe_backend auto$"):
            run_ranks(lambda plan, comm: Engine.load(folder, plan, comm, options, device=CPU), "single", world_size=1)
