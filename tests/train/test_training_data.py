"""Examples, packed rows, buckets and batches: what a training step sees is what inference would build."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from phase_parallel.models.hunyuan_image_3.keys import checkpoint_shapes
from phase_parallel.models.hunyuan_image_3.reference_images import encoder_input, posterior_sample
from phase_parallel.models.hunyuan_image_3.vae import Vae
from phase_parallel.train import corpus as corpus_module
from phase_parallel.train.batches import Batches
from phase_parallel.train.captions import parse_recaption
from phase_parallel.train.corpus import JOB_BYTES, Encoders, build_corpus, drawing_processes
from phase_parallel.train.distil_training import distil_bucket
from phase_parallel.train.examples import WRITINGS, draw_example
from phase_parallel.train.mini import mini_config
from phase_parallel.train.packing import PAD, Bucket, Form, pack_row, stack
from phase_parallel.train.scenes import is_unseen, size_of

SCALING = 0.5


@pytest.fixture(scope="module")
def encoders() -> Encoders:
    config, _ = mini_config("instruct", SCALING)
    generator = torch.Generator().manual_seed(0)
    shapes = checkpoint_shapes(config)
    weights = {key: torch.randn(shape, generator=generator) * 0.05 + float("norm" in key) for key, shape in shapes.items()}
    for key in [key for key in weights if key.startswith("vae.") and shapes[key][2:3] == (3,)]:
        weights[key][:, :, 0::2] = 0  # as the VAE's training leaves them
    return Encoders(config, weights, torch.device("cpu"))


def tensors(bucket: Bucket) -> list[Tensor]:
    found = []
    for field in fields(bucket):
        value = getattr(bucket, field.name)
        found += [value] if isinstance(value, Tensor) else [item for item in value if isinstance(item, Tensor)] if isinstance(value, tuple) else []
    return found


@pytest.mark.parametrize("pictures", [0, 1, 2])
def test_no_unseen_object_is_ever_learned(pictures: int) -> None:
    for seed in range(60):
        example = draw_example(seed, pictures=pictures, writing="recaption")
        scenes = [example.result.scene, *(source.scene for source in example.sources)]
        assert not any(is_unseen(thing) for scene in scenes for thing in scene.objects)


def test_the_text_describes_the_picture_that_follows() -> None:
    for pictures in (0, 1, 2):
        for seed in range(30):
            example = draw_example(seed, pictures=pictures, writing="think_recaption")
            thought, described = example.cot_text.removesuffix("</recaption>").split("<recaption>")
            assert thought.startswith("<think>") and thought.endswith("</think>")
            assert parse_recaption(described) == example.result.scene


def test_what_an_edit_leaves_alone_is_drawn_where_it_was() -> None:
    for seed in range(30):
        example = draw_example(seed, pictures=2, writing="nothing")
        assert example.result.seed == example.sources[0].seed != example.sources[1].seed


@pytest.mark.parametrize("pictures", [0, 1, 2])
def test_distil_rows_are_those_that_its_configuration_builds(pictures: int) -> None:
    config, tokenizer = mini_config("instruct", SCALING)
    distil_config, distil_tokenizer = mini_config("distil", SCALING)
    examples = [draw_example(seed, pictures=pictures, writing=writing) for seed in range(4) for writing in WRITINGS]
    for aspect in ("square", "wide", "tall"):
        same = [example for example in examples if example.result.scene.aspect == aspect]
        if not same:
            continue
        latents = torch.zeros(len(same), config.vae.latent_channels, *(side // 16 for side in size_of(aspect)))
        form = Form((), aspect, "nothing")
        made = distil_bucket(stack(form, [pack_row(e, tokenizer, config) for e in same], latents, (), ()), distil_tokenizer)
        want = stack(form, [pack_row(e, distil_tokenizer, distil_config) for e in same], latents, (), ())
        length = want.tokens.shape[1]
        assert bool((made.tokens[:, length:] == PAD).all())
        for name in ("tokens", "blanked", "positions", "groups"):
            assert torch.equal(getattr(made, name)[:, :length], getattr(want, name)), name
        for name in ("lengths", "image_corner", "targets", "sources"):
            assert torch.equal(getattr(made, name), getattr(want, name)), name


def test_a_corpus_is_the_same_with_any_number_of_workers(encoders: Encoders) -> None:
    counts = {(0, "nothing"): 3, (1, "recaption"): 2}
    alone, shared = (build_corpus(encoders, counts, seed=5, workers=workers) for workers in (1, 2))
    assert [bucket.form for bucket in alone] == [bucket.form for bucket in shared]
    assert sum(len(bucket) for bucket in alone) == 5
    for one, other in zip(alone, shared, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))
    (edited,) = [bucket for bucket in alone if bucket.form.sources][:1]
    assert edited.source_latents[0].shape[1:] == edited.latents.shape[1:] and edited.source_vit[0].shape[1:] == (64, 64)


@pytest.mark.parametrize(("room", "processes"), [(0, 1), (2 * JOB_BYTES, 2), (2 * JOB_BYTES - 1, 1), (100 * JOB_BYTES, 8)])
def test_as_many_draw_as_shared_memory_holds(room: int, processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=room))
    assert drawing_processes(8) == processes


@torch.no_grad()
def test_pictures_are_encoded_as_inference_does(encoders: Encoders) -> None:
    config = encoders.config
    vae = Vae(config.vae)
    vae.load_state_dict(encoders._vae.state_dict())
    pixels = torch.randint(0, 256, (2, 3, 64, 48), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    mean, logvar = vae.encode(encoder_input(pixels))
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(7))
    want = posterior_sample(mean, logvar, noise, config.vae.scaling_factor)
    got = encoders.latents(pixels, torch.Generator().manual_seed(7))
    assert torch.allclose(got.float(), want, rtol=2e-3, atol=2e-3)


def test_batches_are_of_one_size_and_follow_the_shares() -> None:
    config, tokenizer = mini_config("instruct", SCALING)

    def bucket(writing: str, count: int) -> Bucket:
        examples = [e for seed in range(40) if (e := draw_example(seed, pictures=0, writing=writing)).result.scene.aspect == "square"][:count]
        rows = [pack_row(example, tokenizer, config) for example in examples]
        return stack(Form((), "square", writing), rows, torch.zeros(count, 16, 16, 16), (), ())

    short, long = bucket("nothing", 4), bucket("think_recaption", 6)
    batches = Batches([short, long], {(0, "nothing"): 0.75, (0, "think_recaption"): 0.25}, tokens=1500, seed=1)
    rows = {"nothing": 0, "think_recaption": 0}
    for _ in range(600):
        batch = batches.chosen(*batches.draw())
        rows[batch.form.writing] += len(batch)
        assert len(batch) == 1500 // (batch.tokens.shape[1] + 256)
    assert rows["nothing"] / sum(rows.values()) == pytest.approx(0.75, abs=0.05)
