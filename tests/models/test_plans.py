"""The engine under every plan of one to eight ranks, ranks as threads: same picture, same bits on all ranks, weights that never move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import engine_of
from specs import ALL_PLANS
from thread_world import run_ranks

from phase_parallel.models.hunyuan_image_3.engine import Engine, ImageRequest
from phase_parallel.models.hunyuan_image_3.loading import LoadOptions
from phase_parallel.models.hunyuan_image_3.sequence import build_image_rows
from phase_parallel.models.hunyuan_image_3.text_generation import TextRequest, TextResult
from phase_parallel.parallel.collectives import Communicator
from phase_parallel.parallel.plan import ParallelPlan

PROMPT = "two pears on a blue table"


def choose_size(engine: Engine) -> TextResult:
    request = TextRequest(PROMPT, None, None, "img_ratio", need_ratio=True, max_new_tokens=1)
    return engine.generate_text(request)


def draw(engine: Engine, *, guidance: float = 4.0, batch: int = 1, size: tuple[int, int] = (128, 432)) -> torch.Tensor:
    rows = build_image_rows(
        engine.tokenizer, engine.config, prompt=PROMPT, system_prompt=None, cot_text=None, cond_images=(), height=size[0], width=size[1]
    )
    return engine.sample(ImageRequest(rows, steps=2, guidance=guidance, flow_shift=3.0, seeds=tuple(range(batch))))


def picture(folder: Path, plan: ParallelPlan, comm: Communicator, **settings: Any) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """(latent with guidance, latent without, tokens)."""
    engine = engine_of(folder, plan, comm, **settings)
    text = choose_size(engine)
    return draw(engine), draw(engine, guidance=1.0, batch=2), text.tokens


@pytest.fixture(scope="module")
def reference(eight_ways: Path) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    return run_ranks(lambda plan, comm: picture(eight_ways, plan, comm), "single", world_size=1)[0]


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((got - expected).abs().max() <= 1e-4 * expected.abs().max())


@pytest.mark.parametrize("name", [name for name in ALL_PLANS if name != "single"])
def test_every_plan_draws_the_reference_picture(name: str, eight_ways: Path, reference: tuple) -> None:
    """27 latent columns and one timestep token: the block's 217 tokens divide by no number of ranks."""
    results = run_ranks(lambda plan, comm: picture(eight_ways, plan, comm), **ALL_PLANS[name])
    for rank, (guided, plain, tokens) in enumerate(results):
        assert torch.equal(guided, results[0][0]) and torch.equal(plain, results[0][1]), f"rank {rank} has other bits than rank 0"
        assert tokens == reference[2]
    assert close(results[0][0], reference[0]) and close(results[0][1], reference[1])


@pytest.mark.parametrize(
    ("plan", "settings"),
    [
        ("hybrid4-ulysses", {"options": LoadOptions(moe_layout="expert_major")}),
        ("hybrid8-s2-cfg_sp", {"options": LoadOptions(moe_layout="expert_major")}),
        ("hybrid4-kv_gather", {"options": LoadOptions(moe_path="two_dispatch")}),
        ("hybrid4-ulysses", {"cfg_mode": "serial"}),
        ("hybrid4-cfg", {"reuse_text": False}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_ablations_draw_the_reference_picture(plan: str, settings: dict[str, Any], eight_ways: Path, reference: tuple) -> None:
    guided, _, _ = run_ranks(lambda p, comm: picture(eight_ways, p, comm, **settings), **ALL_PLANS[plan])[0]
    assert close(guided, reference[0])


def addresses(engine: Engine) -> dict[str, int]:
    """Address of every resident tensor, through each phase's weights and through the modules around the trunk."""
    found = {f"around.{name}": p.data_ptr() for name, p in engine.model.around.named_parameters()}
    for phase, weights in engine.model.weights.items():
        found |= {f"{phase}.wte": weights.wte.tensor.data_ptr(), f"{phase}.lm_head": weights.lm_head.tensor.data_ptr()}
        for layer in weights.layers:
            for field in ("qkv_proj", "o_proj", "shared_gate_and_up", "shared_down"):
                found[f"{phase}.{layer.site}.{field}"] = getattr(layer, field).tensor.data_ptr()
            for number, block in enumerate(layer.experts):
                found[f"{phase}.{layer.site}.w1.{number}"] = block.w1.data_ptr()
                found[f"{phase}.{layer.site}.w2.{number}"] = block.w2.data_ptr()
    return found


@pytest.mark.parametrize("layout", ["micro_major", "expert_major"])
def test_a_phase_switch_moves_nothing(layout: str, eight_ways: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AR, denoise, AR, denoise: same addresses, same views, no group made, no resident tensor allocated."""
    made = []
    monkeypatch.setattr(torch.distributed, "new_group", lambda *a, **k: made.append(a))

    def body(plan: ParallelPlan, comm: Communicator) -> None:
        engine = engine_of(eight_ways, plan, comm, options=LoadOptions(moe_layout=layout))
        before = addresses(engine)
        views = {phase: comm.phase(phase) for phase in ("prefill", "decode", "denoise")}
        for _ in range(2):
            choose_size(engine)
            draw(engine)
        assert addresses(engine) == before
        assert all(comm.phase(phase) is view for phase, view in views.items())

    run_ranks(body, "hybrid", world_size=4)
    assert not made


@pytest.mark.parametrize("layout", ["micro_major", "expert_major"])
def test_micro_views_share_storage_with_their_parents(layout: str, eight_ways: Path) -> None:
    def body(plan: ParallelPlan, comm: Communicator) -> None:
        model = engine_of(eight_ways, plan, comm, options=LoadOptions(moe_layout=layout)).model
        for ar, denoise in zip(model.weights["prefill"].layers, model.weights["denoise"].layers, strict=True):
            pairs = [
                (getattr(ar, field).tensor, getattr(denoise, field).tensor)
                for field in ("qkv_proj", "o_proj", "shared_gate_and_up", "shared_down")
            ]
            pairs += [(ar.experts[0].w1, denoise.experts[0].w1), (ar.experts[0].w2, denoise.experts[0].w2)]
            for view, parent in pairs:
                assert view.untyped_storage().data_ptr() == parent.untyped_storage().data_ptr()
            assert ar.qkv_proj.tensor.numel() * 2 == denoise.qkv_proj.tensor.numel()
            assert ar.o_proj.tensor.stride() == denoise.o_proj.tensor.stride()  # strided columns, no copy
            assert ar.experts[0].w1.is_contiguous() == (layout == "micro_major")

    run_ranks(body, "hybrid", world_size=4)
