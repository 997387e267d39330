"""Guidance: batched, serial, split over ranks; the order of rows; the loop and when it meets the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from engines import engine_of
from specs import ALL_PLANS
from thread_world import run_ranks

from phase_parallel.models.hunyuan_image_3.denoise import Denoiser, DenoiseRow, StepTrace, guide, sample
from phase_parallel.models.hunyuan_image_3.engine import Engine, ImageRequest
from phase_parallel.models.hunyuan_image_3.model import StepInputs
from phase_parallel.models.hunyuan_image_3.schedule import flow_sigmas
from phase_parallel.models.hunyuan_image_3.sequence import ImageRows, build_image_rows
from phase_parallel.parallel.collectives import Communicator
from phase_parallel.parallel.plan import ParallelPlan

STEP = StepInputs(700.0)
CFG_PLANS = ["hybrid4-cfg", "hybrid8-s2-cfg_sp", "hybrid8-s2-cfg_sp-kv_gather", "hybrid8-s4-cfg"]


class Stopped(Exception):
    """What a section raises when the user cancels."""


def rows_of(engine: Engine, prompt: str = "a kite") -> ImageRows:
    return build_image_rows(
        engine.tokenizer, engine.config, prompt=prompt, system_prompt=None, cot_text=None, cond_images=(), height=128, width=432
    )


def latents_of(engine: Engine, count: int = 1) -> torch.Tensor:
    return torch.randn(count, engine.config.vae.latent_channels, 8, 27, generator=torch.Generator().manual_seed(3))


def mixed(engine: Engine, kinds: Sequence[str]) -> list[DenoiseRow]:
    """Rows of two pictures; ``c1`` is the conditional row of latent 1."""
    rows = rows_of(engine)
    choose = {"c": (rows.cond, "cond"), "u": (rows.uncond, "uncond")}
    return [DenoiseRow(*choose[kind[0]], latent=int(kind[1])) for kind in kinds]


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max())


@pytest.fixture(scope="module")
def wanted(eight_ways: Path) -> dict[str, torch.Tensor]:
    """Velocity of each row alone, on one rank."""

    def body(plan: ParallelPlan, comm: Communicator) -> dict[str, torch.Tensor]:
        engine = engine_of(eight_ways, plan, comm)
        kinds = ("c0", "u0", "c1", "u1")
        return {kind: engine.velocity(mixed(engine, [kind]), latents_of(engine, 2), STEP)[0] for kind in kinds}

    return run_ranks(body, "single", world_size=1)[0]


@pytest.mark.parametrize(
    "kinds",
    [
        ("c0", "u0"),  # the usual pair
        ("u0", "c0"),  # a host may put the unconditional row first
        ("u1", "c0", "c1", "u0"),  # two pictures in any order
        ("c0",),  # guidance off
        ("u0",),
        ("c0", "c1"),
        ("c0", "u0", "c1"),  # does not split into halves: every rank computes every row
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("name", ["single", "hybrid4-ulysses", *CFG_PLANS])
def test_velocities_come_in_the_order_of_the_rows(
    name: str, kinds: tuple[str, ...], eight_ways: Path, wanted: dict[str, torch.Tensor]
) -> None:
    def body(plan: ParallelPlan, comm: Communicator) -> torch.Tensor:
        engine = engine_of(eight_ways, plan, comm)
        return engine.velocity(mixed(engine, kinds), latents_of(engine, 2), STEP)

    results = run_ranks(body, **ALL_PLANS[name])
    assert all(torch.equal(result, results[0]) for result in results)
    for velocity, kind in zip(results[0], kinds, strict=True):
        assert relative(velocity, wanted[kind]) < 1e-5


@pytest.mark.parametrize("name", ["single", "tp2", "hybrid4-kv_gather", "hybrid4-cfg", "hybrid8-s2-cfg_sp"])
def test_serial_guidance_equals_batched_guidance(name: str, eight_ways: Path) -> None:
    def body(plan: ParallelPlan, comm: Communicator) -> list[torch.Tensor]:
        kinds, found = ("c0", "u0", "c1", "u1"), []
        for mode in ("batched", "serial"):
            engine = engine_of(eight_ways, plan, comm, cfg_mode=mode)
            found.append(engine.velocity(mixed(engine, kinds), latents_of(engine, 2), STEP))
        return found

    for batched, serial in run_ranks(body, **ALL_PLANS[name]):
        assert relative(serial, batched) < 1e-5


@pytest.mark.parametrize("mode", ["batched", "serial"])
@pytest.mark.parametrize("name", ["single", "tp2", "hybrid4-kv_gather", "hybrid4-cfg"])
def test_both_branches_share_one_embedding_of_their_latent(name: str, mode: str, eight_ways: Path) -> None:
    def body(plan: ParallelPlan, comm: Communicator) -> list[int]:
        engine = engine_of(eight_ways, plan, comm, cfg_mode=mode)
        rows, seen = mixed(engine, ("c0", "u0")), []
        engine.denoiser.prepare(rows)
        hook = engine.model.around.patch_embed.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
        try:
            engine.velocity(rows, latents_of(engine), STEP)
        finally:
            hook.remove()  # other tests use the same model
        return seen

    found = run_ranks(body, **ALL_PLANS[name])
    assert found == [[1]] * len(found)


def test_half_of_the_ranks_compute_one_branch(eight_ways: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(plan: ParallelPlan, comm: Communicator) -> tuple[list[str], int]:
        engine = engine_of(eight_ways, plan, comm)
        rows, seen = mixed(engine, ("c0", "u0")), []
        real = engine.model.denoise
        monkeypatch.setattr(engine.model, "denoise", lambda blocks, *rest: seen.extend(blocks) or real(blocks, *rest))
        engine.velocity(rows, latents_of(engine), STEP)
        return ["cond" if block.row == rows[0].row else "uncond" for block in seen], comm.ledger.counts["cfg_gather"]

    assert run_ranks(body, **ALL_PLANS["hybrid4-cfg"]) == [(["cond"], 1), (["cond"], 1), (["uncond"], 1), (["uncond"], 1)]


@pytest.mark.parametrize("name", ["single", "hybrid4-cfg", "hybrid4-kv_gather"])
def test_a_step_computes_no_prefix_that_was_prepared(name: str, eight_ways: Path) -> None:
    def body(plan: ParallelPlan, comm: Communicator) -> bool:
        engine = engine_of(eight_ways, plan, comm)
        rows = mixed(engine, ["c0", "u0"])
        engine.denoiser.prepare(rows)
        engine.model.prefill = None  # nobody may call it
        try:
            return bool(engine.velocity(rows, latents_of(engine), STEP).isfinite().all())
        finally:
            del engine.model.prefill  # other tests use the same model

    assert all(run_ranks(body, **ALL_PLANS[name]))


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown CFG mode 'both'; choose one of batched, serial"):
        Denoiser(None, None, cfg_mode="both")


@pytest.mark.parametrize("scale", [0.0, 1.0, 7.5])
def test_guidance_formula(scale: float) -> None:
    cond, uncond = torch.tensor([3.0, 1.0]), torch.tensor([1.0, 2.0])
    assert torch.allclose(guide(cond, uncond, scale), torch.tensor([1.0 + 2.0 * scale, 2.0 - scale]))
    assert guide(cond, None, scale) is cond


class TestLoop:
    def run(self, folder: Path, **changes: object) -> tuple[torch.Tensor, list[StepTrace], list[tuple[int, int]]]:
        engine = run_ranks(lambda plan, comm: engine_of(folder, plan, comm), "single", world_size=1)[0]
        rows = rows_of(engine)
        traces: list[StepTrace] = []
        checks: list[tuple[int, int]] = []
        settings = {"guidance": 4.0, "check": lambda done, total: checks.append((done, total))} | changes
        latent = sample(
            engine.denoiser,
            rows.cond,
            rows.uncond,
            latents_of(engine, settings.pop("batch", 1)),
            flow_sigmas(3, 3.0),
            trace=lambda index, step: traces.append(step),
            **settings,
        )
        return latent, traces, checks

    def test_euler_along_the_schedule(self, eight_ways: Path) -> None:
        latent, traces, checks = self.run(eight_ways)
        assert checks == [(0, 3), (1, 3), (2, 3), (3, 3)], "before each step and once at the end"
        sigmas = flow_sigmas(3, 3.0).tolist()
        values = [trace.latent_in for trace in traces] + [latent]
        for index, trace in enumerate(traces):
            pred = trace.pred_uncond + 4.0 * (trace.pred_cond - trace.pred_uncond)
            assert torch.allclose(trace.pred, pred)
            assert torch.allclose(values[index + 1], values[index] + (sigmas[index + 1] - sigmas[index]) * pred, atol=1e-6)

    @pytest.mark.parametrize("guidance", [1.0, 0.5, 0.0])
    def test_scale_of_one_or_less_leaves_the_unconditional_row_out(self, guidance: float, eight_ways: Path) -> None:
        _, traces, _ = self.run(eight_ways, guidance=guidance)
        assert all(trace.pred_uncond is None and trace.pred is trace.pred_cond for trace in traces)

    def test_scale_counts(self, eight_ways: Path) -> None:
        assert relative(self.run(eight_ways, guidance=2.0)[0], self.run(eight_ways, guidance=6.0)[0]) > 1e-3

    def test_pictures_of_a_batch_are_those_of_single_runs(self, eight_ways: Path) -> None:
        both, _, _ = self.run(eight_ways, batch=2)
        first, _, _ = self.run(eight_ways, batch=1)
        assert relative(both[:1], first) < 1e-5 and relative(both[1:], first) > 1e-2

    def test_a_stop_ends_the_loop_before_the_next_step(self, eight_ways: Path) -> None:
        seen: list[int] = []

        def stop(done: int, total: int) -> None:
            seen.append(done)
            if done == 2:
                raise Stopped

        with pytest.raises(Stopped):
            self.run(eight_ways, check=stop)
        assert seen == [0, 1, 2]


class TestDistilled:
    """Guidance and the next timestep are inputs of the network, and one row is enough."""

    def velocity(self, folder: Path, plan: str, **changes: float) -> list[torch.Tensor]:
        step = StepInputs(**{"timestep": 700.0, "timestep_r": 500.0, "guidance": 2.5} | changes)

        def body(own: ParallelPlan, comm: Communicator) -> torch.Tensor:
            engine = engine_of(folder, own, comm)
            rows = rows_of(engine)
            assert rows.uncond is None
            return engine.velocity([DenoiseRow(rows.cond, "cond")], latents_of(engine), step)

        return run_ranks(body, **ALL_PLANS[plan])

    @pytest.mark.parametrize("change", [{"guidance": 6.0}, {"timestep_r": 300.0}, {"timestep": 710.0}])
    def test_each_input_counts(self, distil: Path, change: dict[str, float]) -> None:
        assert relative(self.velocity(distil, "single", **change)[0], self.velocity(distil, "single")[0]) > 1e-4

    def test_guidance_is_rounded_to_bf16(self, distil: Path) -> None:
        """1000 times 2.5 and 1000 times 2.496 are one bf16 number."""
        assert torch.equal(self.velocity(distil, "single", guidance=2.496)[0], self.velocity(distil, "single")[0])

    @pytest.mark.parametrize("plan", ["tp4", "hybrid4-ulysses", "hybrid4-kv_gather", "hybrid4-cfg"])
    def test_plans_agree(self, distil: Path, plan: str) -> None:
        results = self.velocity(distil, plan)
        assert all(torch.equal(result, results[0]) for result in results)
        assert relative(results[0], self.velocity(distil, "single")[0]) < 1e-5

    def test_loop_embeds_the_guidance(self, distil: Path) -> None:
        def body(plan: ParallelPlan, comm: Communicator) -> list[torch.Tensor]:
            engine = engine_of(distil, plan, comm)
            return [
                engine.sample(ImageRequest(rows_of(engine), steps=2, guidance=guidance, flow_shift=3.0, seeds=(1,)))
                for guidance in (1.0, 2.5, 2.5)
            ]

        low, high, again = run_ranks(body, "single", world_size=1)[0]
        assert torch.equal(high, again) and relative(low, high) > 1e-4
