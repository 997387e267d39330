"""The engine's calls: bf16, noise, VAE, results that are not finite, and life after a fault."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import engine_of
from specs import ALL_PLANS, EIGHT_WAYS
from thread_world import run_ranks

from phase_parallel.models.hunyuan_image_3.denoise import DenoiseRow
from phase_parallel.models.hunyuan_image_3.engine import Engine, ImageRequest, NotFiniteError
from phase_parallel.models.hunyuan_image_3.loading import LoadOptions
from phase_parallel.models.hunyuan_image_3.model import StepInputs
from phase_parallel.models.hunyuan_image_3.references import draw_noise
from phase_parallel.models.hunyuan_image_3.sequence import build_image_rows
from phase_parallel.models.hunyuan_image_3.synthetic import write_checkpoint
from phase_parallel.models.hunyuan_image_3.text_generation import TextRequest
from phase_parallel.parallel.collectives import Communicator
from phase_parallel.parallel.plan import ParallelPlan


def request_of(engine: Engine, **changes: object) -> ImageRequest:
    rows = build_image_rows(
        engine.tokenizer, engine.config, prompt="a kite", system_prompt=None, cot_text=None, cond_images=(), height=128, width=432
    )
    return ImageRequest(**{"rows": rows, "steps": 2, "guidance": 4.0, "flow_shift": 3.0, "seeds": (1,)} | changes)


def alone(folder: Path) -> Engine:
    return run_ranks(lambda plan, comm: engine_of(folder, plan, comm), "single", world_size=1)[0]


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max())


class TestBf16:
    """The release's dtype: the same code, with rounding."""

    @pytest.fixture(scope="class")
    @staticmethod
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("bf16") / "base"
        write_checkpoint(folder, replace(EIGHT_WAYS, dtype="bfloat16"))
        return folder

    @pytest.mark.parametrize("name", ["single", "tp4", "hybrid4-ulysses", "hybrid4-kv_gather", "hybrid4-cfg"])
    @pytest.mark.parametrize("layout", ["micro_major", "expert_major"])
    def test_all_plans_stay_near_fp32(self, name: str, layout: str, folder: Path) -> None:
        def body(plan: ParallelPlan, comm: Communicator) -> tuple[torch.Tensor, int | None]:
            engine = engine_of(folder, plan, comm, options=LoadOptions("auto", layout))
            assert engine.model.dtype == torch.bfloat16
            text = engine.generate_text(TextRequest("a kite", None, None, "img_ratio", need_ratio=True, max_new_tokens=1))
            return engine.sample(request_of(engine)), text.ratio_index

        wide = run_ranks(
            lambda plan, comm: (lambda e: e.sample(request_of(e)))(engine_of(folder, plan, comm, options=LoadOptions("fp32"))),
            "single",
            world_size=1,
        )[0]
        results = run_ranks(body, **ALL_PLANS[name])
        for latent, ratio in results:
            assert latent.dtype == torch.float32 and torch.equal(latent, results[0][0]) and ratio == 12
        assert relative(results[0][0], wide) < 0.1


class TestNoise:
    def test_numbers_of_a_seed(self, eight_ways: Path) -> None:
        """torch.randn in bf16 on the CPU, as torch 2.14 draws it; written down, because older versions draw other numbers."""
        engine = alone(eight_ways)
        drawn = engine.draw(request_of(engine, seeds=(9,)))
        assert drawn.dtype == torch.float32 and drawn.shape == (1, engine.config.vae.latent_channels, 8, 27)
        values = drawn.flatten().tolist()
        assert values[:4] == [-1.0703125, -0.71875, 1.0859375, -1.578125]
        assert values[-3:] == [-0.326171875, -0.1025390625, -0.392578125]

    def test_each_picture_has_its_own_seed(self, eight_ways: Path) -> None:
        engine = alone(eight_ways)
        both = engine.draw(request_of(engine, seeds=(1, 2)))
        assert torch.equal(both[:1], engine.draw(request_of(engine, seeds=(1,))))
        assert torch.equal(both[1:], engine.draw(request_of(engine, seeds=(2,))))
        assert not torch.equal(both[0], both[1])

    def test_pictures_come_before_the_latent(self) -> None:
        posterior, latent = draw_noise(4, [(1, 2, 3, 3), (1, 2, 2, 2)], (1, 2, 4, 4))
        generator = torch.Generator().manual_seed(4)
        for drawn, shape in zip(posterior, [(1, 2, 3, 3), (1, 2, 2, 2)], strict=True):
            assert torch.equal(drawn, torch.randn(shape, generator=generator))
        assert latent.shape == (1, 2, 4, 4) and not torch.equal(latent, draw_noise(4, [], (1, 2, 4, 4))[1])

    def test_given_noise_is_used(self, eight_ways: Path) -> None:
        engine = alone(eight_ways)
        noise = torch.randn(1, engine.config.vae.latent_channels, 8, 27)
        given = engine.sample(request_of(engine, noise=noise))
        assert torch.equal(given, engine.sample(request_of(engine, noise=noise, seeds=(77,))))
        assert not torch.equal(given, engine.sample(request_of(engine)))


class TestVae:
    def test_sizes_and_scaling(self, eight_ways: Path) -> None:
        engine = alone(eight_ways)
        pixels = torch.rand(2, 3, 32, 48) * 2 - 1
        mean, logvar = engine.vae_encode(pixels)
        assert mean.shape == logvar.shape == (2, engine.config.vae.latent_channels, 2, 3)
        assert engine.vae_decode(mean).shape == (2, 3, 32, 48)
        assert torch.allclose(engine.unscale(mean * engine.config.vae.scaling_factor), mean, atol=1e-6)

    def test_decoder_takes_half_precision_latents(self, eight_ways: Path) -> None:
        engine = alone(eight_ways)
        latent = torch.randn(1, engine.config.vae.latent_channels, 2, 2)
        assert relative(engine.vae_decode(latent.half()), engine.vae_decode(latent)) < 0.05


    def test_decoding_can_be_stopped_before_any_block(self, eight_ways: Path) -> None:
        engine = alone(eight_ways)
        latents = torch.zeros(2, engine.config.vae.latent_channels, 2, 2)
        seen: list[tuple[int, int]] = []
        engine.vae_decode(latents, check=lambda done, total: seen.append((done, total)))
        total = seen[0][1]
        assert seen == [(done, total) for done in range(total)] * 2 and total > 5

        def stop(done: int, total: int) -> None:
            if done == 3:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            engine.vae_decode(latents, check=stop)


class TestNotFinite:
    """NaN is an error, never a picture."""

    def test_velocity(self, eight_ways: Path) -> None:
        engine = alone(eight_ways)
        request = request_of(engine)
        latents = torch.full((1, engine.config.vae.latent_channels, 8, 27), float("nan"))
        with pytest.raises(
            NotFiniteError, match=r"^the velocity at timestep 700 holds NaN or infinity, so no picture is made from it; try weight dtype"
        ):
            engine.velocity([DenoiseRow(request.rows.cond, "cond")], latents, StepInputs(700.0))

    def test_peers_that_failed_are_told_before_the_numbers_are_read(self, eight_ways: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Reading a result of the device would wait for a peer without end."""
        engine = alone(eight_ways)
        request = request_of(engine)
        latents = torch.full((1, engine.config.vae.latent_channels, 8, 27), float("nan"))

        def told(what: str) -> None:
            raise KeyError(what)

        monkeypatch.setattr(engine.model.comm, "await_device", told)
        with pytest.raises(KeyError, match="a step of the picture"):
            engine.velocity([DenoiseRow(request.rows.cond, "cond")], latents, StepInputs(700.0))
        with pytest.raises(KeyError, match="the last step of the picture"):
            engine.sample(request)

    def test_latent(self, eight_ways: Path) -> None:
        engine = alone(eight_ways)
        noise = torch.full((1, engine.config.vae.latent_channels, 8, 27), float("inf"))
        with pytest.raises(NotFiniteError, match=r"^the final latent holds NaN or infinity"):
            engine.sample(request_of(engine, noise=noise))

    def test_picture(self, eight_ways: Path) -> None:
        engine = alone(eight_ways)
        with pytest.raises(NotFiniteError, match=r"^the decoded picture holds NaN or infinity"):
            engine.vae_decode(torch.full((1, engine.config.vae.latent_channels, 2, 2), float("nan")))

    def test_one_bad_rank_is_an_error_on_that_rank(self, eight_ways: Path) -> None:
        """Damaged keys and values on one rank reach all ranks through the reduction."""

        def body(plan: ParallelPlan, comm: Communicator) -> str:
            engine = engine_of(eight_ways, plan, comm)
            request = request_of(engine)
            record = engine.prefixes.prepare(request.rows.cond, (), frozenset({0}))
            if plan.rank == 2:
                record.cache.v[0, 0] = float("nan")
            try:
                engine.sample(replace(request, guidance=1.0))
            except NotFiniteError as error:
                return str(error)
            return ""

        assert all("holds NaN" in text for text in run_ranks(body, **ALL_PLANS["hybrid4-ulysses"]))


def test_after_a_fault_weights_stay_and_prefixes_go(eight_ways: Path) -> None:
    def first(plan: ParallelPlan, comm: Communicator) -> tuple[Engine, torch.Tensor]:
        engine = engine_of(eight_ways, plan, comm)
        return engine, engine.sample(request_of(engine))

    before = run_ranks(first, **ALL_PLANS["hybrid4-cfg"])

    def second(plan: ParallelPlan, comm: Communicator) -> torch.Tensor:
        engine = before[plan.rank][0]
        assert engine.prefixes.nbytes > 0
        weights = engine.model.weights
        engine.connect(comm)
        assert engine.prefixes.nbytes == 0 and engine.model.weights is weights and engine.model.comm is comm
        return engine.sample(request_of(engine))

    for (_, old), new in zip(before, run_ranks(second, **ALL_PLANS["hybrid4-cfg"]), strict=True):
        assert torch.equal(old, new)


def test_loading_says_what_is_wrong_before_the_weights_are_read(eight_ways: Path, tmp_path: Path) -> None:
    for file in eight_ways.iterdir():
        if file.name != "tokenizer.json":
            shutil.copy(file, tmp_path)

    def body(plan: ParallelPlan, comm: Communicator) -> None:
        with pytest.raises(ValueError, match=r"tokenizer.json"):
            Engine.load(
                tmp_path,
                plan,
                comm,
                LoadOptions(),
                device=torch.device("cpu"),
                progress=lambda done, total: pytest.fail("weights were read"),
            )

    run_ranks(body, "single", world_size=1)
