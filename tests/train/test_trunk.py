"""The network of training against the engine that users run: the same weights give the same velocity and the same next token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from phase_parallel.models.hunyuan_image_3.denoise import DenoiseRow
from phase_parallel.models.hunyuan_image_3.engine import Engine
from phase_parallel.models.hunyuan_image_3.keys import checkpoint_shapes
from phase_parallel.models.hunyuan_image_3.loading import LoadOptions
from phase_parallel.models.hunyuan_image_3.model import StepInputs
from phase_parallel.models.hunyuan_image_3.references import prepare_reference
from phase_parallel.models.hunyuan_image_3.sequence import build_image_rows, build_text_row
from phase_parallel.parallel.collectives import Communicator
from phase_parallel.parallel.groups import ProcessGroups
from phase_parallel.parallel.plan import make_plan
from phase_parallel.train.examples import Example, draw_example
from phase_parallel.train.mini import Kind, mini_config, write_mini
from phase_parallel.train.objective import NO_ANSWER, losses, text_targets
from phase_parallel.train.packing import Bucket, Form, draw, pack_row, stack
from phase_parallel.train.scenes import size_of
from phase_parallel.train.trunk import StepTimes, TrainingTrunk

SCALING = 0.5
CPU = torch.device("cpu")


def network_and_weights(kind: Kind) -> tuple[TrainingTrunk, dict[str, Tensor]]:
    """A network whose every part matters, and the whole checkpoint around it, rounded as the files are."""
    config, _ = mini_config(kind, SCALING)
    network = TrainingTrunk(config)
    network.initialize(seed=3)
    generator = torch.Generator().manual_seed(4)
    weights: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, weight in network.named_parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
            weights[name] = weight.copy_(weight.half().float())
    for name, shape in checkpoint_shapes(config).items():
        if name not in weights:
            spread = 0.1 * torch.randn(shape, generator=generator)
            weights[name] = (1 + spread if "norm" in name and name.endswith("weight") else spread).half().float()
    return network.eval(), weights


def engine_of(folder: Path, kind: Kind) -> tuple[Engine, TrainingTrunk]:
    network, weights = network_and_weights(kind)
    write_mini(folder, kind, weights, SCALING)
    plan = make_plan("single", world_size=1, rank=0)
    comm = Communicator(plan, ProcessGroups(plan, {}, None, "gloo"))
    return Engine.load(folder, plan, comm, LoadOptions(), device=CPU), network


def bucket_of(engine: Engine, example: Example, noises: list[Tensor]) -> tuple[Bucket, list]:
    """One example as training sees it, and its sources as the engine does."""
    config = engine.config
    prepared = [prepare_reference(draw(picture), config, engine.table) for picture in example.sources]
    encoded = engine.encode_references(prepared, noises)
    height, width = size_of(example.result.scene.aspect)
    vit = [engine.model.around.vision_model(p.patches[None], p.mask[None], [p.grid]) for p in prepared]
    form = Form(tuple(p.scene.aspect for p in example.sources), example.result.scene.aspect, "think_recaption")
    latents = torch.zeros(1, config.vae.latent_channels, height // 16, width // 16)
    sources = tuple(item.features.latent[None] for item in encoded)
    return stack(form, [pack_row(example, engine.tokenizer, config)], latents, sources, tuple(vit)), [(p, e) for p, e in zip(prepared, encoded, strict=True)]


@pytest.mark.parametrize(("kind", "pictures"), [("instruct", 0), ("instruct", 1), ("instruct", 2), ("distil", 0)])
@torch.no_grad()
def test_velocity_and_logits_are_those_of_the_engine(tmp_path: Path, kind: Kind, pictures: int) -> None:
    engine, network = engine_of(tmp_path / "mini", kind)
    config = engine.config
    example = draw_example(5 + pictures, pictures=pictures, writing="think_recaption")
    generator = torch.Generator().manual_seed(1)
    shapes = [(1, config.vae.latent_channels, *(side // 16 for side in size_of(p.scene.aspect))) for p in example.sources]
    bucket, sources = bucket_of(engine, example, [torch.randn(shape, generator=generator) for shape in shapes])
    noisy = torch.randn(bucket.latents.shape, generator=generator)
    distilled = kind == "distil"
    times = StepTimes(torch.tensor([700.0]), torch.tensor([450.0]) if distilled else None, torch.tensor([2496.0]) if distilled else None)
    step = StepInputs(700.0, 450.0 if distilled else None, 2.5 if distilled else None)

    height, width = size_of(example.result.scene.aspect)
    texts = {"prompt": example.prompt, "system_prompt": example.system_prompt, "cond_images": tuple(p.cond_image(config) for p, _ in sources)}
    rows = build_image_rows(engine.tokenizer, config, **texts, cot_text=example.cot_text, height=height, width=width)
    features = tuple(item.features for _, item in sources)
    for unconditional, row in ((False, rows.cond), (True, rows.uncond)):
        if row is None:
            continue
        want = engine.velocity([DenoiseRow(row, "uncond" if unconditional else "cond", features)], noisy, step)
        got = network(bucket, noisy, times, torch.tensor([unconditional]))
        assert float((got.velocity - want).abs().max() / want.abs().max()) < 2e-5
        assert float(want.std()) > 0.05, "a velocity of nothing proves nothing"

    opened = build_text_row(engine.tokenizer, config, **texts, cot_text=example.cot_text, task="auto")
    cache = engine.model.new_cache(len(opened), "prefill")
    hidden = engine.model.prefill(opened, 0, len(opened), cache, features)
    want = engine.model.next_logits(hidden, "prefill")
    got = network(bucket, noisy, times, torch.tensor([False])).logits[0, : len(opened)]
    assert int((text_targets(bucket, torch.tensor([False]))[0, : len(opened)] != NO_ANSWER).sum()) > 20
    assert float((got - want[: len(opened)]).abs().max() / want.abs().max()) < 2e-5


def test_padding_and_neighbours_change_nothing(tmp_path: Path) -> None:
    engine, network = engine_of(tmp_path / "mini", "instruct")
    examples = [draw_example(seed, pictures=0, writing=writing) for seed, writing in ((1, "think_recaption"), (2, "nothing"))]
    rows = [pack_row(example, engine.tokenizer, engine.config) for example in examples]
    latents = torch.randn(2, engine.config.vae.latent_channels, 16, 16, generator=torch.Generator().manual_seed(0))
    form = Form((), "square", "nothing")
    both = stack(form, rows, latents, (), ())
    alone = stack(form, rows[1:], latents[1:], (), ())
    assert both.tokens.shape[1] > alone.tokens.shape[1]
    no = torch.tensor([False, False])
    with torch.no_grad():
        together = network(both, latents, StepTimes(torch.full((2,), 500.0)), no).velocity[1]
        single = network(alone, latents[1:], StepTimes(torch.full((1,), 500.0)), no[:1]).velocity[0]
    assert torch.allclose(together, single, atol=1e-5)


def test_every_weight_learns(tmp_path: Path) -> None:
    engine, network = engine_of(tmp_path / "mini", "instruct")
    example = draw_example(9, pictures=1, writing="think_recaption")
    shape = (1, engine.config.vae.latent_channels, *(side // 16 for side in size_of(example.sources[0].scene.aspect)))
    bucket, _ = bucket_of(engine, example, [torch.zeros(shape)])
    bucket = bucket.chosen(torch.zeros(8, dtype=torch.long))
    result = losses(network, bucket, torch.Generator().manual_seed(2))
    result.total.backward()
    still = [name for name, weight in network.named_parameters() if weight.grad is None or not bool(weight.grad.any())]
    assert still == []


def test_the_assistant_s_tokens_are_the_targets(tmp_path: Path) -> None:
    config, tokenizer = mini_config("instruct", SCALING)
    example = replace(draw_example(3, pictures=0, writing="recaption"), system_prompt="Draw what the user wants.")
    row = pack_row(example, tokenizer, config)
    height, width = size_of(example.result.scene.aspect)
    bucket = stack(Form((), "square", "recaption"), [row, row], torch.zeros(2, 16, height // 16, width // 16), (), ())
    nothing, answers = text_targets(bucket, torch.tensor([True, False]))
    (places,) = (answers != NO_ANSWER).nonzero(as_tuple=True)
    assert bool((nothing == NO_ANSWER).all())
    ratio = tokenizer.ratio_ids[{"square": 16, "wide": 12, "tall": 20}[example.result.scene.aspect]]
    assert tokenizer.decode(answers[places].tolist()) == f"{example.cot_text}<answer><boi><img_size_256>" + tokenizer.decode([ratio])
    assert int(places[0]) == row.targets[0] - 1
