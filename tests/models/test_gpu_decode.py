"""The device loop on a GPU: as exact as bfloat16 allows, no synchronisation, no growth. Skipped where there is no CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phase_parallel.bench.ar import NoRules
from phase_parallel.kernels.flashinfer_experts import why_not_flashinfer
from phase_parallel.kernels.next_token import Draw
from phase_parallel.models.hunyuan_image_3.engine import Engine
from phase_parallel.models.hunyuan_image_3.loading import LoadOptions
from phase_parallel.models.hunyuan_image_3.sequence import build_text_row
from phase_parallel.models.hunyuan_image_3.synthetic import SyntheticSpec, write_checkpoint
from phase_parallel.models.hunyuan_image_3.token_loop import DeviceLoop, HostLoop, TextJob, TokenLoop
from phase_parallel.models.reduction import GroupReduction
from phase_parallel.parallel.collectives import Communicator
from phase_parallel.parallel.groups import ProcessGroups
from phase_parallel.parallel.plan import make_plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SPEC = SyntheticSpec(
    kind="instruct", layers=4, hidden=512, heads=8, kv_heads=4, head_dim=64, experts=16, topk=4, expert_width=384, vocab=4096,
    max_positions=16384, dtype="bfloat16", max_shard_bytes=64 << 20,
)  # fmt: skip
STEPS = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpu") / "checkpoint"
    write_checkpoint(path, SPEC)
    return path


def load(folder: Path, dtype: str, kernels: str, moe_backend: str = "auto") -> Engine:
    """With a head that writes the tokens in a circle: the right logit stands far above the others."""
    plan = make_plan("single", world_size=1)
    comm = Communicator(plan, ProcessGroups(plan, {}, None, "nccl"))
    device = torch.device("cuda")
    engine = Engine.load(folder, plan, comm, LoadOptions(weight_dtype=dtype, kernels=kernels, moe_backend=moe_backend), device=device)
    weights = engine.model.weights["decode"]
    embedding, head = weights.wte.tensor.float(), weights.lm_head.tensor
    order = torch.randperm(SPEC.vocab, generator=torch.Generator().manual_seed(3)).to(device)
    head[order] = (head[order].float() + 4.0 * embedding[order.roll(1)] / embedding[order.roll(1)].norm(dim=-1, keepdim=True)).to(head.dtype)
    return engine


def run(engine: Engine, loop_class: type[DeviceLoop] | type[HostLoop], *, limit: int, draw: Draw, trace: list | None = None) -> TokenLoop:
    model = engine.model
    row = build_text_row(engine.tokenizer, engine.config, prompt="a cat on a mat", system_prompt=None, cot_text=None, cond_images=(), task="think")
    cache = model.new_cache(len(row) + limit + 1, "prefill")
    job = TextJob(row.tokens, limit, NoRules(), draw, torch.Generator().manual_seed(1))
    extra = () if loop_class is HostLoop else (GroupReduction(),)
    loop = loop_class(model, cache, job, *extra, None if trace is None else trace.append)
    hidden = model.prefill(row, 0, len(row), cache)
    loop.start(model.next_logits(hidden[-1:], "prefill")[0])
    return loop


def finish(loop: TokenLoop) -> list[int]:
    while not loop.done:
        loop.advance(16)
    return list(loop.tokens)


def test_errors_are_those_of_bfloat16(folder: Path) -> None:
    """Against fp32 on the same weights: the fused path is no further away than the eager bfloat16 path, and writes the same tokens."""
    exact, eager, fused = [], [], []
    want = finish(run(load(folder, "fp32", "eager"), HostLoop, limit=STEPS, draw=Draw(False), trace=exact))
    assert len(set(want)) > STEPS // 2, "the text must not stand still"
    assert finish(run(load(folder, "bf16", "eager"), HostLoop, limit=STEPS, draw=Draw(False), trace=eager)) == want
    engine = load(folder, "bf16", "auto")
    assert finish(run(engine, DeviceLoop, limit=STEPS, draw=Draw(False), trace=fused)) == want
    assert finish(run(engine, DeviceLoop, limit=STEPS, draw=Draw(False))) == want, "replays in groups write the same"

    def distance(logits: list[torch.Tensor]) -> float:
        return float(sum((a.float() - b).norm() / b.norm() for a, b in zip(logits, exact, strict=True)) / len(exact))

    print(f"distance to fp32 over {STEPS} tokens: eager {distance(eager):.2e}, fused {distance(fused):.2e}")
    assert distance(fused) <= 1.05 * distance(eager)


def test_fp32_kernels_equal_the_eager_path(folder: Path) -> None:
    exact, fused = [], []
    want = finish(run(load(folder, "fp32", "eager"), HostLoop, limit=64, draw=Draw(False), trace=exact))
    assert finish(run(load(folder, "fp32", "fused"), DeviceLoop, limit=64, draw=Draw(False), trace=fused)) == want
    assert max(float((a - b).norm() / b.norm()) for a, b in zip(fused, exact, strict=True)) < 1e-5


@pytest.fixture
def flashinfer() -> None:
    reason = why_not_flashinfer(torch.device("cuda"), torch.bfloat16)
    if reason is not None:
        pytest.skip(f"FlashInfer: {reason}")


@pytest.mark.usefixtures("flashinfer")
def test_flashinfers_experts_write_the_same_tokens(folder: Path) -> None:
    """In the prefill and in the graph of a step, which records what was tuned before."""
    want = finish(run(load(folder, "fp32", "eager"), HostLoop, limit=64, draw=Draw(False)))
    engine = load(folder, "bf16", "auto", "flashinfer")
    assert ", tuned for up to " in engine.moe_words
    assert finish(run(engine, DeviceLoop, limit=64, draw=Draw(False))) == want
    assert finish(run(engine, HostLoop, limit=64, draw=Draw(False))) == want


@pytest.mark.usefixtures("flashinfer")
def test_step_with_flashinfers_experts_does_not_synchronise(folder: Path) -> None:
    does_not_synchronise(load(folder, "bf16", "auto", "flashinfer"))


def test_step_does_not_synchronise(folder: Path) -> None:
    does_not_synchronise(load(folder, "bf16", "auto"))


def does_not_synchronise(engine: Engine) -> None:
    loop = run(engine, DeviceLoop, limit=200, draw=Draw(True, 0.6, 1024, 0.95))
    loop.advance(4)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(16):
            loop.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_is_flat_over_ten_thousand_tokens(folder: Path) -> None:
    loop = run(load(folder, "bf16", "auto"), DeviceLoop, limit=10_000, draw=Draw(True, 0.9, 50, 0.95, 1.1))
    loop.advance(100)
    before = torch.cuda.memory_allocated()
    tokens = finish(loop)
    assert len(tokens) == 10_000
    assert torch.cuda.memory_allocated() == before
    again = finish(run(load(folder, "bf16", "auto"), DeviceLoop, limit=10_000, draw=Draw(True, 0.9, 50, 0.95, 1.1)))
    assert again == tokens, "the same seed writes the same text"
