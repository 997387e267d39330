"""Token rows: every golden case to the last index, and the rules a golden case does not reach."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from phase_parallel.models.hunyuan_image_3.config import HunyuanImage3Config
from phase_parallel.models.hunyuan_image_3.sequence import (
    CondImage,
    ImageRows,
    SequenceError,
    build_image_rows,
    build_text_row,
    dense_mask,
    resolution_table,
    rope_tables,
)
from phase_parallel.models.hunyuan_image_3.synthetic import SyntheticSpec, write_settings
from phase_parallel.models.hunyuan_image_3.system_prompts import clean_system_prompt
from phase_parallel.models.hunyuan_image_3.text_rules import COT_TASKS
from phase_parallel.models.hunyuan_image_3.tokenizer import HunyuanTokenizer

Model = tuple[HunyuanImage3Config, HunyuanTokenizer]


def load_model(folder: Path) -> Model:
    config = HunyuanImage3Config.from_folder(folder)
    return config, HunyuanTokenizer.from_folder(folder, config)


@pytest.fixture(scope="module")
def models(golden_dir: Path) -> dict[str, Model]:
    return {folder.name: load_model(folder) for folder in sorted((golden_dir / "checkpoints").iterdir())}


@pytest.fixture(scope="module")
def by_kind(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    found = {}
    for kind in ("base", "instruct", "distil"):
        folder = tmp_path_factory.mktemp("settings") / kind
        write_settings(folder, SyntheticSpec(kind=kind))
        found[kind] = load_model(folder)
    return found


@pytest.fixture(scope="module")
def cases(golden_dir: Path) -> list[tuple[dict, dict[str, Tensor]]]:
    found = []
    for folder in sorted((golden_dir / "cases").iterdir()):
        spec = json.loads((folder / "case.json").read_text())
        if spec["task"] != "modules":
            found.append((spec, load_file(folder / "expected.safetensors")))
    assert found, f"{golden_dir} has no cases"
    return found


def cond_images(spec: dict, tensors: dict[str, Tensor], model: Model) -> list[CondImage]:
    config, tokenizer = model
    images = []
    for i in range(len(spec["input_images"])):
        height, width = tensors[f"cond{i}.pixels_u8"].shape[1:]
        factor = config.vae.ffactor_spatial
        images.append(
            CondImage(
                ratio_index=resolution_table(config, tokenizer).nearest(height, width),
                vae_grid=(height // factor, width // factor),
                vit_grid=tuple(tensors[f"cond{i}.vit_grid"].tolist()),
                vit_slots=tensors[f"cond{i}.vit_mask"].numel(),
            )
        )
    return images


def rows_of_case(spec: dict, tensors: dict[str, Tensor], model: Model) -> ImageRows:
    config, tokenizer = model
    table = resolution_table(config, tokenizer)
    index = table.parse_image_size(spec["image_size"], config.kind)
    if index == "auto":
        index = spec["expected"]["ratio_index"]
    height, width = table.size(index)
    return build_image_rows(
        tokenizer,
        config,
        prompt=spec["prompt"],
        system_prompt=clean_system_prompt(spec["system_prompt"], config.kind),
        cot_text=spec["expected"].get("cot_text", spec["cot_text"]),
        cond_images=cond_images(spec, tensors, model),
        height=height,
        width=width,
    )


def test_image_rows_of_all_golden_cases(cases, models) -> None:
    seen = 0
    for spec, tensors in cases:
        if not spec["denoise"]:
            continue
        seen += 1
        model = models[spec["checkpoint"]]
        config = model[0]
        name = spec["name"]
        rows = rows_of_case(spec, tensors, model)
        assert list(rows.cond.tokens) == tensors["tokens.cond"].tolist(), name
        assert (rows.height, rows.width) == tuple(tensors["image_size"].tolist()), name
        if "tokens.uncond" in tensors:
            assert list(rows.uncond.tokens) == tensors["tokens.uncond"].tolist(), name
            assert replace(rows.uncond, tokens=rows.cond.tokens) == rows.cond, name
        else:
            assert rows.uncond is None, name
        mask = dense_mask(rows.cond, config.cond_token_attn_type)
        assert torch.equal(mask.to(torch.uint8), tensors["mask.cond"]), name
        gen = rows.cond.gen
        assert list(gen.image) == tensors["gen_image_slice"].tolist(), name
        assert gen.timestep_index == tensors["gen_timestep_index"].item() == rows.cond.prefix_length, name
        for field in ("guidance_index", "timestep_r_index"):
            expected = tensors[field].item() if field in tensors else None
            assert getattr(gen, field) == expected, (name, field)
        positions = rows.cond.positions(config.cond_token_attn_type, rope_type=config.rope_type)
        cos, sin = rope_tables(positions, config.head_dim, config.rope_theta)
        torch.testing.assert_close(cos, tensors["rope.cos"], rtol=0, atol=1e-6)
        torch.testing.assert_close(sin, tensors["rope.sin"], rtol=0, atol=1e-6)
        for i, span in enumerate(rows.cond.cond):
            assert list(span.vae) == tensors[f"cond{i}.vae_slice"].tolist(), name
            assert list(span.vit) == tensors[f"cond{i}.vit_slice"].tolist(), name
            assert span.timestep_index == tensors[f"cond{i}.timestep_index"].item(), name
    assert seen


def test_text_rows_of_all_golden_cases(cases, models) -> None:
    seen = 0
    for spec, tensors in cases:
        if "ar.prompt_tokens" not in tensors:
            continue
        seen += 1
        config, tokenizer = models[spec["checkpoint"]]
        task = spec["bot_task"].split("_")[0] if spec["bot_task"] in COT_TASKS else "img_ratio"
        row = build_text_row(
            tokenizer,
            config,
            prompt=spec["prompt"],
            system_prompt=clean_system_prompt(spec["system_prompt"], config.kind),
            cot_text=spec["cot_text"],
            cond_images=cond_images(spec, tensors, (config, tokenizer)),
            task=task,
        )
        assert list(row.tokens) == tensors["ar.prompt_tokens"].tolist(), spec["name"]
        if "mask.cond" in tensors and row.cond:
            mask = dense_mask(row, config.cond_token_attn_type).to(torch.uint8)
            assert torch.equal(mask, tensors["mask.cond"][: len(row), : len(row)]), spec["name"]
    assert seen


PICTURE = CondImage(ratio_index=16, vae_grid=(2, 3), vit_grid=(2, 2), vit_slots=6)
TEXTS = {"prompt": "a cat", "system_prompt": None, "cot_text": None, "cond_images": []}
SQUARE = {"height": 256, "width": 256}


def test_uncond_row_blanks_prompt_and_assistant_bodies_only(by_kind) -> None:
    config, tokenizer = by_kind["instruct"]
    texts = {**TEXTS, "system_prompt": "ab", "cot_text": "x<think>yz</think> <recaption>w</recaption>"}
    rows = build_image_rows(tokenizer, config, **texts, **SQUARE)
    text = tokenizer.decode(rows.uncond.tokens)
    blank = "<cfg>"
    assert text.startswith(
        f"<|startoftext|>ab\n\nUser: {blank * 5}\n\nAssistant: {blank}<think>{blank * 2}</think>{blank}"
        f"<recaption>{blank}</recaption><answer><boi><img_size_256><img_ratio_16><timestep><img>"
    )
    assert text.endswith("<img><eoi></answer>\n\n")


def test_assistant_text_without_a_pair_is_an_answer(by_kind) -> None:
    config, tokenizer = by_kind["instruct"]
    rows = build_image_rows(tokenizer, config, **{**TEXTS, "cot_text": "<think>ab"}, **SQUARE)
    assert "Assistant: <answer><think>ab</answer><answer><boi>" in tokenizer.decode(rows.cond.tokens)
    config, tokenizer = by_kind["base"]
    rows = build_image_rows(tokenizer, config, **{**TEXTS, "cot_text": "ab"}, **SQUARE)
    assert tokenizer.decode(rows.cond.tokens).startswith("<|startoftext|>a catab<boi>")


def test_drop_think_removes_the_think_pair(by_kind) -> None:
    config, tokenizer = by_kind["instruct"]
    dropping = replace(config, generation=replace(config.generation, drop_think=True))
    texts = {**TEXTS, "cot_text": "<think>a</think><recaption>b</recaption>"}
    rows = build_image_rows(tokenizer, dropping, **texts, **SQUARE)
    assert "Assistant: <recaption>b</recaption><answer>" in tokenizer.decode(rows.cond.tokens)


@pytest.mark.parametrize(
    ("kind", "task", "cot_text", "end"),
    [
        ("instruct", "auto", None, "\n\nAssistant: "),
        ("instruct", "think", None, "\n\nAssistant: <think>"),
        ("instruct", "img_ratio", None, "\n\nAssistant: <answer><boi><img_size_256>"),
        ("instruct", "recaption", "<think>q</think>", "\n\nAssistant: <think>q</think><recaption>"),
        ("base", "auto", None, "<|startoftext|>a cat"),
        ("base", "img_ratio", None, "<|startoftext|>a cat<boi><img_size_256>"),
    ],
)
def test_text_row_ends_where_the_model_continues(by_kind, kind, task, cot_text, end) -> None:
    config, tokenizer = by_kind[kind]
    row = build_text_row(tokenizer, config, **{**TEXTS, "cot_text": cot_text}, task=task)
    assert tokenizer.decode(row.tokens).endswith(end)
    assert row.gen is None
    assert row.prefix_length == len(row)


def test_distil_has_its_special_tokens_before_the_picture_and_no_uncond_row(by_kind) -> None:
    config, tokenizer = by_kind["distil"]
    rows = build_image_rows(tokenizer, config, **TEXTS, height=1000, width=750)
    assert rows.uncond is None
    assert (rows.height, rows.width, rows.ratio_index) == (1024, 768, 33)
    gen = rows.cond.gen
    assert "<img_ratio_33><timestep><guidance><timestep_r><img>" in tokenizer.decode(rows.cond.tokens)
    assert (gen.guidance_index, gen.timestep_r_index) == (gen.timestep_index + 1, gen.timestep_index + 2)
    assert gen.image == (gen.timestep_index + 3, gen.timestep_index + 3 + 64 * 48)


def test_two_pictures_stand_before_the_prompt_in_order(by_kind) -> None:
    config, tokenizer = by_kind["instruct"]
    second = replace(PICTURE, ratio_index=0, vae_grid=(1, 1))
    texts = {**TEXTS, "cond_images": [PICTURE, second]}
    row = build_text_row(tokenizer, config, **texts, task="auto")
    size = "<boi><img_size_256>"
    assert tokenizer.decode(row.tokens) == (
        f"<|startoftext|>User: {size}<img_ratio_16><timestep>{'<img>' * 6}<joint_img_sep>{'<img>' * 6}<eoi>"
        f"{size}<img_ratio_0><timestep><img><joint_img_sep>{'<img>' * 6}<eoi>a cat\n\nAssistant: "
    )
    rows = build_image_rows(tokenizer, config, **texts, **SQUARE)
    assert rows.cond.cond == row.cond == rows.uncond.cond
    for span, image in zip(row.cond, (PICTURE, second), strict=True):
        assert (span.vae_grid, span.vit_grid) == (image.vae_grid, image.vit_grid)
        for start, stop in (span.vae, span.vit):
            assert set(row.tokens[start:stop]) == {tokenizer.special.img}
        assert row.tokens[span.timestep_index] == tokenizer.special.timestep


def test_too_long_rows_are_refused(by_kind) -> None:
    config, tokenizer = by_kind["instruct"]
    long_prompt = {**TEXTS, "prompt": "b" * 300}
    with pytest.raises(SequenceError, match="max_position_embeddings is 300; shorten"):
        build_image_rows(tokenizer, replace(config, max_position_embeddings=300), **long_prompt, **SQUARE)
    short = replace(config, generation=replace(config.generation, max_length=300))
    with pytest.raises(SequenceError, match="max_length of generation_config"):
        build_text_row(tokenizer, short, **long_prompt, task="think")


def test_pictures_that_do_not_fit_are_refused(by_kind) -> None:
    with pytest.raises(SequenceError, match="takes no input pictures"):
        build_text_row(*by_kind["base"][::-1], **{**TEXTS, "cond_images": [PICTURE]}, task="auto")
    for bad, sentence in (
        (replace(PICTURE, ratio_index=37), "Ratio index 37 is outside the size table; choose 0 to 36"),
        (replace(PICTURE, vit_grid=(7, 1)), "7 patches but 6 slots"),
    ):
        with pytest.raises(SequenceError, match=sentence):
            build_text_row(*by_kind["instruct"][::-1], **{**TEXTS, "cond_images": [bad]}, task="auto")
