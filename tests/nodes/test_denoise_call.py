"""One engine call for all rows of the sampler's batch."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from phase_parallel.models.hunyuan_image_3.topology_choice import TopologyWish
from phase_parallel.nodes.denoise_call import DenoiseCall, next_sigma
from phase_parallel.nodes.engine_handle import EngineChoice, EngineHandle
from phase_parallel.nodes.image_rows import build_conditionings
from phase_parallel.parallel.plan import make_plan

CHECKPOINTS = Path(__file__).resolve().parents[1] / "golden" / "checkpoints"

SCHEDULE = torch.tensor([1.0, 0.9, 0.75, 0.5, 0.0])


@pytest.fixture
def pair(engine: EngineHandle) -> tuple[Any, Any]:
    return build_conditionings(engine, prompt="a cat", system_prompt=None, cot_text="", height=256, width=256)


def call_of(engine: EngineHandle, rows: tuple[Any, ...]) -> DenoiseCall:
    return DenoiseCall(engine, {row.handle: row for row in rows})


def handles(*rows: Any) -> torch.Tensor:
    return torch.tensor([[row.handle] for row in rows])


def test_both_branches_travel_in_one_call(engine: EngineHandle, calls: Any, pair: tuple[Any, Any]) -> None:
    latents = torch.randn(4, 16, 16, 16)
    velocity = call_of(engine, pair)(
        latents,
        torch.full((4,), 900.0),
        row_handle=handles(pair[1], pair[1], pair[0], pair[0]),
        transformer_options={"sample_sigmas": SCHEDULE},
    )
    assert velocity.shape == latents.shape
    ((name, args, tensors),) = calls.made
    assert name == "denoise"
    assert [row["kind"] for row in args["rows"]] == ["uncond", "uncond", "cond", "cond"]
    assert args["rows"][2]["row"] == pair[0].row.to_json()
    assert (args["sigma"], args["sigma_next"]) == (pytest.approx(0.9), 0.75)
    assert args["place"] == [1, 4], "for people: one of the run's four steps is done"
    assert args["guidance"] is None
    assert torch.equal(tensors["latents"], latents)
    assert [row["latent"] for row in args["rows"]] == [0, 1, 2, 3]


def test_a_latent_that_branches_share_is_sent_once(engine: EngineHandle, calls: Any, pair: tuple[Any, Any]) -> None:
    pictures = torch.randn(2, 16, 16, 16)
    call_of(engine, pair)(
        torch.cat([pictures, pictures]),
        torch.full((4,), 900.0),
        row_handle=handles(pair[1], pair[1], pair[0], pair[0]),
        transformer_options={"sample_sigmas": SCHEDULE},
    )
    ((_, args, tensors),) = calls.made
    assert [(row["kind"], row["latent"]) for row in args["rows"]] == [("uncond", 0), ("uncond", 1), ("cond", 0), ("cond", 1)]
    assert torch.equal(tensors["latents"], pictures)


def test_token_ids_never_pass_through_a_tensor(engine: EngineHandle, pair: tuple[Any, Any]) -> None:
    """ComfyUI casts conditioning tensors to the model's dtype; only an int64 handle travels that way."""
    marker, options = pair[0].as_conditioning()[0]
    assert marker.numel() == 1
    assert not any(isinstance(value, torch.Tensor) for value in options.values())
    assert call_of(engine, pair).dtype == torch.float32


def test_the_samplers_own_sigma_is_preferred(engine: EngineHandle, calls: Any, pair: tuple[Any, Any]) -> None:
    sigmas = torch.tensor([0.75])
    call_of(engine, pair)(
        torch.zeros(2, 16, 16, 16),
        torch.tensor([0.75, 0.75]),  # a node that gives timesteps another factor
        row_handle=handles(*pair),
        transformer_options={"sigmas": sigmas, "sample_sigmas": SCHEDULE},
    )
    assert (calls.made[0][1]["sigma"], calls.made[0][1]["sigma_next"]) == (0.75, 0.5)


def test_several_noise_levels_are_refused(engine: EngineHandle, calls: Any, pair: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="several noise levels"):
        call_of(engine, pair)(
            torch.zeros(2, 16, 16, 16), torch.tensor([900.0, 800.0]), row_handle=handles(*pair)
        )
    assert calls.made == []


def test_different_guidance_is_refused(engine: EngineHandle, pair: tuple[Any, Any]) -> None:
    strong = pair[0].with_guidance(4.0)
    weak = pair[1].with_guidance(2.0)
    with pytest.raises(ValueError, match="different guidance values"):
        call_of(engine, (strong, weak))(
            torch.zeros(2, 16, 16, 16), torch.tensor([900.0, 900.0]), row_handle=handles(strong, weak)
        )


@pytest.mark.parametrize(
    ("sigma", "after"), [(1.0, 0.9), (0.9, 0.75), (0.95, 0.9), (0.6, 0.5), (0.5, 0.0), (0.0, 0.0)]
)
def test_next_sigma(sigma: float, after: float) -> None:
    assert next_sigma(SCHEDULE, sigma) == pytest.approx(after)
    assert next_sigma(None, sigma) is None


def test_distilled_checkpoint_has_no_second_branch_to_run(engine: EngineHandle, calls: Any) -> None:
    engine.config = replace(engine.config, cfg_distilled=True)
    rows = build_conditionings(engine, prompt="a cat", system_prompt=None, cot_text="", height=256, width=256)
    with pytest.raises(ValueError, match=r"is distilled and has no unconditional branch; set cfg to 1\.0"):
        call_of(engine, rows)(torch.zeros(2, 16, 16, 16), torch.full((2,), 900.0), row_handle=handles(*rows))
    assert calls.made == []


class TestWay:
    """Rank 0 chooses the topology of every call and sends it along."""

    @pytest.fixture
    def engine(self, calls: Any) -> EngineHandle:
        plan = make_plan("hybrid", world_size=4)
        return EngineHandle(EngineChoice(str(CHECKPOINTS / "tiny-base"), plan, "auto", "micro_major", "multi_micro"), calls, wish=TopologyWish())

    @pytest.mark.parametrize(
        ("which", "way"), [((0, 1), "cfg"), ((1, 1, 0, 0), "cfg"), ((0,), "sp"), ((0, 0), "sp"), ((1,), "sp"), ((0, 0, 1), "sp")]
    )
    def test_guided_is_a_row_of_each_branch(self, which: tuple[int, ...], way: str, engine: EngineHandle, calls: Any, pair: tuple[Any, Any]) -> None:
        rows = [pair[number] for number in which]
        call_of(engine, pair)(torch.zeros(len(rows), 16, 16, 16), torch.full((len(rows),), 900.0), row_handle=handles(*rows))
        sent = calls.made[0][1]["way"]
        assert sent["denoise"] == way
        assert sent == asdict(engine.denoise_way(guided=way == "cfg", image_tokens=256, prefix=pair[which[0]].row.prefix_length))

    def test_a_plan_without_a_wish_is_kept(self, calls: Any, pair: tuple[Any, Any]) -> None:
        plan = make_plan("hybrid", world_size=4, denoise="cfg")
        engine = EngineHandle(EngineChoice(str(CHECKPOINTS / "tiny-base"), plan, "auto", "micro_major", "multi_micro"), calls)
        assert engine.denoise_way(guided=False, image_tokens=256, prefix=100).denoise == "cfg"

    def test_the_loader_says_both_ways(self, engine: EngineHandle, calls: Any) -> None:
        assert engine.plan_words() == "hybrid: AR TP4 · denoise TP2×CFG2 with guidance, TP2×SP2 (kv_gather) without"
        fixed = EngineHandle(engine.choice, calls)
        assert fixed.plan_words() == "hybrid: AR TP4 · denoise TP2×SP2 (ulysses)"
