"""Instruct under several plans, ranks as threads: pictures kept by key, text about them, a picture drawn from both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from thread_world import run_ranks

from phase_parallel.models.hunyuan_image_3 import references as references_module
from phase_parallel.models.hunyuan_image_3.engine import Engine, ImageRequest
from phase_parallel.models.hunyuan_image_3.loading import LoadOptions
from phase_parallel.models.hunyuan_image_3.model import HunyuanImage3Model
from phase_parallel.models.hunyuan_image_3.references import (
    PreparedReference,
    ReferenceNotKept,
    prepare_reference,
    reference_digest,
)
from phase_parallel.models.hunyuan_image_3.sequence import build_image_rows
from phase_parallel.models.hunyuan_image_3.text_generation import Sampling, TextRequest
from phase_parallel.parallel.collectives import Communicator
from phase_parallel.parallel.plan import ParallelPlan

PLANS = {
    "tp4": dict(name="tp", world_size=4),
    "hybrid4-ulysses": dict(name="hybrid", world_size=4),
    "hybrid4-cfg": dict(name="hybrid", world_size=4, denoise="cfg"),
}
PROMPT = "both on one beach"


@dataclass(frozen=True)
class Outcome:
    tokens: tuple[int, ...]
    known: tuple[int, int]
    latent: torch.Tensor


def photo(seed: int, height: int, width: int) -> torch.Tensor:
    return torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def load(folder: Path, plan: ParallelPlan, comm: Communicator) -> Engine:
    return Engine.load(folder, plan, comm, LoadOptions(), device=torch.device("cpu"))


def edit(folder: Path, plan: ParallelPlan, comm: Communicator) -> Outcome:
    engine = load(folder, plan, comm)
    pictures = [prepare_reference(photo(s, *size), engine.config, engine.table) for s, size in ((1, (90, 200)), (2, (64, 64)))]
    keys = engine.references.encode(pictures, 5)
    features, cond_images = engine.references.get(keys)
    sampling = Sampling(do_sample=True, temperature=0.6, top_k=50, top_p=0.95, seed=3)
    request = TextRequest(PROMPT, None, None, "recaption", need_ratio=True, max_new_tokens=20, sampling=sampling)
    text = engine.generate_text(request, features=features, cond_images=cond_images)
    height, width = engine.table.size(text.ratio_index)
    rows = build_image_rows(
        engine.tokenizer, engine.config, prompt=PROMPT, system_prompt=None, cot_text=text.cot_text, cond_images=cond_images,
        height=height, width=width,
    )  # fmt: skip
    known = (engine.prefixes.known_tokens(rows.cond, features), engine.prefixes.known_tokens(rows.uncond, features))
    assert all(span.vit[1] <= known[1] < rows.uncond.prefix_length for span in rows.uncond.cond), "both rows share the pictures"
    latent = engine.sample(ImageRequest(rows, steps=2, guidance=2.5, flow_shift=3.0, seeds=(7,), features=features))
    return Outcome(text.tokens, known, latent)


@pytest.fixture(scope="module")
def stand_in_features() -> Iterator[None]:
    """The vision modules are the same on every rank and slow on a CPU; the golden cases run them under every plan."""

    def encode(model: HunyuanImage3Model, picture: PreparedReference, noise: torch.Tensor) -> SimpleNamespace:
        vit = torch.randn(picture.patches.shape[0], model.config.hidden_size, generator=torch.Generator().manual_seed(1))
        return SimpleNamespace(features=model.reference_features(noise[0], vit, reference_digest(picture, noise)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(references_module, "encode_reference", encode)
        yield


@pytest.fixture(scope="module")
def alone(small_instruct: Path, stand_in_features: None) -> Outcome:
    return run_ranks(lambda plan, comm: edit(small_instruct, plan, comm), "single", world_size=1)[0]


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_edits_alike(name: str, small_instruct: Path, alone: Outcome) -> None:
    """Sampled tokens are equal on all ranks and plans; the picture has equal bits on all ranks and differs between plans by rounding."""
    outcomes = run_ranks(lambda plan, comm: edit(small_instruct, plan, comm), **PLANS[name])
    for outcome in outcomes:
        assert outcome.tokens == alone.tokens
        assert outcome.known == alone.known
        assert torch.equal(outcome.latent, outcomes[0].latent)
    assert (outcomes[0].latent - alone.latent).abs().max() <= 1e-4 * alone.latent.abs().max()


def test_each_picture_and_seed_is_encoded_once(small_instruct: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []

    def counting(model: object, picture: object, noise: torch.Tensor) -> SimpleNamespace:
        encoded.append(picture)
        return SimpleNamespace(features=noise)

    monkeypatch.setattr(references_module, "encode_reference", counting)

    def body(plan: ParallelPlan, comm: Communicator) -> None:
        engine = load(small_instruct, plan, comm)
        one, two = (prepare_reference(photo(s, 64, 64), engine.config, engine.table) for s in (1, 2))
        first = engine.references.encode([one, two], 5)
        assert engine.references.encode([one, two], 5) == first and len(encoded) == 2
        assert engine.references.encode([one], 5) == first[:1] and len(encoded) == 2
        assert engine.references.encode([one], 6) != first[:1] and len(encoded) == 3
        engine.references.encode([two, one], 5)
        assert len(encoded) == 5, "the noise of a picture depends on its place"
        with pytest.raises(ReferenceNotKept, match="queue the prompt again"):
            engine.references.get(["nothing"])

    run_ranks(body, "single", world_size=1)


def test_seeds_give_four_pictures_and_the_same_one_twice(small_instruct: Path) -> None:
    def body(plan: ParallelPlan, comm: Communicator) -> list[torch.Tensor]:
        engine = load(small_instruct, plan, comm)
        rows = build_image_rows(
            engine.tokenizer, engine.config, prompt="a", system_prompt=None, cot_text=None, cond_images=(), height=128, width=512
        )
        seeds = (0, 1, 42, 2**40, 42)
        return [engine.sample(ImageRequest(rows, steps=1, guidance=2.5, flow_shift=3.0, seeds=(seed,))) for seed in seeds]

    latents = run_ranks(body, "single", world_size=1)[0]
    assert torch.equal(latents[2], latents[4])
    for first in range(4):
        for second in range(first):
            assert not torch.equal(latents[first], latents[second])
