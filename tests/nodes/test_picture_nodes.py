"""Encode, Generate and the small nodes around them, against a recording stand-in for the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from phase_parallel.models.hunyuan_image_3.token_row import TokenRow
from phase_parallel.nodes.conditioning import ConditioningError, find_row
from phase_parallel.nodes.engine_handle import EngineHandle
from phase_parallel.nodes.model_socket import NoFlowModel
from phase_parallel.nodes.node_encode import HunyuanImage3Encode
from phase_parallel.nodes.node_generate import DrawSettings, HunyuanImage3Generate, draw
from phase_parallel.nodes.node_guidance import HunyuanImage3Guidance
from phase_parallel.nodes.node_latent import EmptyHunyuanImage3Latent, HunyuanImage3Resolution
from phase_parallel.nodes.node_noise import HunyuanImage3ReferenceNoise
from phase_parallel.nodes.node_rewrite import HunyuanImage3Rewrite
from phase_parallel.nodes.progress import NodeProgress
from phase_parallel.nodes.references import prepare_references
from phase_parallel.nodes.text_socket import HunyuanText
from phase_parallel.nodes.text_stage import TextOutcome
from phase_parallel.nodes.vae_socket import HunyuanVae


def tokens(conditioning: list[Any], where: str) -> list[int]:
    marker, options = conditioning[0]
    return list(find_row({"cross_attn": marker, **options}, where=where).row.tokens)


def test_encode_gives_the_golden_rows_and_a_fitting_latent(
    clip: HunyuanText, vae: HunyuanVae, calls: Any, golden_wide: Any
) -> None:
    expected = load_file(golden_wide / "expected.safetensors")
    positive, negative, latent = HunyuanImage3Encode().encode(clip, vae, "a cat on the red mat", 400, 120)
    assert tokens(positive, "positive") == expected["tokens.cond"].tolist()
    assert tokens(negative, "negative") == expected["tokens.uncond"].tolist()
    assert latent["samples"].shape == (1, 16, 8, 27)
    assert latent["downscale_ratio_spacial"] == 16
    assert calls.made == [], "encoding is words only: no rank is asked"


def test_encode_refuses_before_any_rank_is_asked(
    clip: HunyuanText, vae: HunyuanVae, other_engine: EngineHandle
) -> None:
    encode = HunyuanImage3Encode().encode
    with pytest.raises(ValueError, match="two different loaders"):
        encode(clip, HunyuanVae(other_engine), "a cat", 256, 256)
    with pytest.raises(ValueError, match="The clip input is not from Load"):
        encode(object(), vae, "a cat", 256, 256)
    with pytest.raises(ValueError, match="The vae input is not from Load"):
        encode(clip, object(), "a cat", 256, 256)
    with pytest.raises(ValueError, match=r"^cot_text contains <answer>"):
        encode(clip, vae, "a cat", 256, 256, cot_text="<think>a</think><answer>")
    with pytest.raises(ValueError, match="max_position_embeddings is 4096"):
        encode(clip, vae, "x" * 5000, 256, 256)
    with pytest.raises(ValueError, match="draws from text only"):
        encode(clip, vae, "a cat", 256, 256, image1=torch.zeros(1, 64, 64, 3))


def test_cot_text_with_its_tags_is_accepted(clip: HunyuanText, vae: HunyuanVae) -> None:
    encode = HunyuanImage3Encode().encode
    plain, _, _ = encode(clip, vae, "a cat", 256, 256)
    with_text, _, _ = encode(clip, vae, "a cat", 256, 256, cot_text="<recaption>a fat cat</recaption>")
    assert len(tokens(with_text, "positive")) > len(tokens(plain, "positive"))


def test_clip_text_encode_is_told_where_to_go(clip: HunyuanText) -> None:
    with pytest.raises(ValueError, match=r"use HunyuanImage-3\.0 Encode"):
        clip.tokenize("a cat")


def test_rewrite_outputs(clip: HunyuanText, calls: Any) -> None:
    calls.text |= {"cot_text": "<recaption>x</recaption>", "recaption": "x", "height": 256, "width": 128}
    answer = HunyuanImage3Rewrite().rewrite(clip, "a cat", "auto ratio")
    assert answer["result"] == ("<recaption>x</recaption>", "x", 128, 256)
    assert answer["ui"]["text"] == ["x"]


def test_draw_settings_fall_back_to_the_checkpoint(engine: EngineHandle) -> None:
    own = engine.config.generation
    settings = DrawSettings.resolve(
        engine, steps=0, guidance=0.0, flow_shift=0.0, seed=2**64 - 1, batch_size=2
    )
    assert (settings.steps, settings.guidance) == (own.diff_infer_steps, own.diff_guidance_scale)
    assert settings.flow_shift == own.flow_shift
    assert settings.seeds == (2**64 - 1, 0)
    chosen = DrawSettings.resolve(engine, steps=3, guidance=1.0, flow_shift=2.0, seed=0, batch_size=1)
    assert (chosen.steps, chosen.guidance, chosen.flow_shift) == (3, 1.0, 2.0)


def test_draw_sends_both_rows(engine: EngineHandle, calls: Any) -> None:
    settings = DrawSettings(steps=4, guidance=5.0, flow_shift=3.0, seeds=(11, 12))
    references = prepare_references(engine, (), seed=11)
    latents = draw(engine, "a tower", None, TextOutcome("", "", 128, 432), references, settings, NodeProgress(None))
    assert latents.shape == (2, 16, 8, 27)
    name, args, _ = calls.made[0]
    assert name == "sample"
    assert (args["steps"], args["seeds"], args["guidance"]) == (4, [11, 12], 5.0)
    assert len(TokenRow.from_json(args["cond"])) == len(TokenRow.from_json(args["uncond"]))


def test_generate_refuses_a_mix_of_loaders(
    engine: EngineHandle, clip: HunyuanText, vae: HunyuanVae, other_engine: EngineHandle
) -> None:
    generate = HunyuanImage3Generate().generate
    with pytest.raises(ValueError, match="different loaders"):
        generate(NoFlowModel(engine), clip, HunyuanVae(other_engine), "a cat")
    with pytest.raises(ValueError, match="The model input is not from Load"):
        generate(object(), clip, vae, "a cat")


def test_model_of_an_old_host_says_what_to_do(engine: EngineHandle) -> None:
    model = NoFlowModel(engine)
    for attribute in ("load_device", "model", "clone", "model_options", "get_model_object"):
        with pytest.raises(ValueError, match=r"use the HunyuanImage-3\.0 Generate node"):
            getattr(model, attribute)


def test_guidance_is_for_distilled_checkpoints(clip: HunyuanText, vae: HunyuanVae) -> None:
    positive, _, _ = HunyuanImage3Encode().encode(clip, vae, "a cat", 256, 256)
    with pytest.raises(ValueError, match="not a distilled checkpoint"):
        HunyuanImage3Guidance().guide(positive, 2.5)
    with pytest.raises(ConditioningError, match="was not made by"):
        HunyuanImage3Guidance().guide([[torch.zeros(1, 77, 768), {}]], 2.5)


def test_resolution_follows_the_widget_or_the_image() -> None:
    choose = HunyuanImage3Resolution().choose
    assert choose("1280x768 (5:3)") == (1280, 768)
    assert choose("1024x1024 (1:1)", torch.zeros(1, 300, 1200, 3)) == (2048, 512)
    with pytest.raises(ValueError, match="an IMAGE is"):
        choose("1024x1024 (1:1)", torch.zeros(3, 3))


def test_empty_latent() -> None:
    (latent,) = EmptyHunyuanImage3Latent().make(512, 256, 3)
    assert latent["samples"].shape == (3, 32, 16, 32)
    assert latent["downscale_ratio_spacial"] == 16


def test_reference_noise_is_the_golden_noise(golden_wide: Any) -> None:
    expected = load_file(golden_wide / "expected.safetensors")["noise"]
    (noise,) = HunyuanImage3ReferenceNoise().make(11)
    assert noise.seed == 11
    both = noise.generate_noise({"samples": torch.zeros(2, *expected.shape[1:])})
    assert torch.equal(both[:1], expected)
    later = noise.generate_noise({"samples": torch.zeros(1, *expected.shape[1:]), "batch_index": [1]})
    assert torch.equal(both[1:], later)
