"""Golden Instruct and Distil cases through what the nodes do: pictures, text, rows and drawing as operations of the real engine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lone_engine import Events, RecordingHandle, lone_engine
from PIL import Image
from safetensors.torch import load_file

from phase_parallel.models.hunyuan_image_3.reference_images import to_rgb
from phase_parallel.models.hunyuan_image_3.token_row import TokenRow
from phase_parallel.nodes.image_rows import build_conditionings
from phase_parallel.nodes.node_generate import DrawSettings, draw
from phase_parallel.nodes.references import prepare_references
from phase_parallel.nodes.text_stage import Sampling, TextOutcome, TextWish, run_text_stage

GOLDEN = Path(os.environ.get("GOLDEN_DIR") or Path(__file__).resolve().parents[3] / "shared" / "golden")
TASKS = {"image": "auto ratio", "think_recaption": "think + recaption", "recaption": "recaption"}
CASES = (
    "instruct_t2i_given_cot",
    "instruct_t2i_think_recaption_auto",
    "instruct_ti2i_one_image",
    "instruct_ti2i_recaption_ar",
    "instruct_ti2i_two_images_auto",
    "distil_t2i_8_steps",
)


def as_comfy(path: Path) -> torch.Tensor:
    """[1, H, W, 3] in [0, 1], as LoadImage gives it."""
    with Image.open(path) as picture:
        return torch.from_numpy(np.array(to_rgb(picture))).float()[None] / 255


def wish_of(spec: dict[str, Any], folder: Path) -> TextWish:
    auto = spec["image_size"] == "auto"
    height, width = (1024, 1024) if auto else map(int, spec["image_size"].split("x"))
    return TextWish(
        prompt=spec["prompt"],
        task=TASKS[spec["bot_task"]],
        system_prompt="None" if spec["system_prompt"] is None else "custom",
        custom_system_prompt=spec["system_prompt"] or "",
        size="auto" if auto else "width x height",
        width=width,
        height=height,
        max_new_tokens=spec["max_new_tokens"] or 1,
        seed=0,
        sampling=Sampling("greedy"),
        images=tuple(as_comfy(folder / name) for name in spec["input_images"]),
        reference_seed=spec["seed"],
        cot_text=spec["cot_text"] or "",
    )


def settings_of(spec: dict[str, Any]) -> DrawSettings:
    return DrawSettings(spec["steps"], spec["guidance"], spec["flow_shift"], (spec["seed"],))


def read(case: str) -> tuple[dict[str, Any], dict[str, torch.Tensor], Path]:
    folder = GOLDEN / "cases" / case
    if not folder.is_dir():
        pytest.skip(f"golden case {case} is not beside the checkout")
    return json.loads((folder / "case.json").read_text()), load_file(folder / "expected.safetensors"), folder


def run(case: str) -> tuple[RecordingHandle, TextWish, TextOutcome, torch.Tensor]:
    """Handle, wish, outcome of the text stage, final latent as the sampler sees it."""
    spec, _, folder = read(case)
    engine = lone_engine(GOLDEN / "checkpoints" / spec["checkpoint"])
    wish = wish_of(spec, folder)
    outcome = run_text_stage(engine, wish, node_id="1", report=None)
    references = prepare_references(engine, wish.images, seed=wish.reference_seed)
    system = wish.custom_system_prompt.strip() or None
    latent = draw(engine, wish.prompt, system, outcome, references, settings_of(spec), Events())
    return engine, wish, outcome, latent * engine.config.vae.scaling_factor


@pytest.mark.parametrize("case", CASES)
def test_nodes_give_the_golden_picture(case: str) -> None:
    spec, expected, _ = read(case)
    engine, wish, outcome, latent = run(case)
    assert (outcome.height, outcome.width) == (spec["expected"]["height"], spec["expected"]["width"])
    if "cot_text" in spec["expected"]:
        assert outcome.cot_text == spec["expected"]["cot_text"]
    want = expected["latent.final"]
    assert float((latent - want).abs().max() / want.abs().max()) <= 1e-4
    (_, sent, _) = next(made for made in engine.made if made[0] == "sample")
    assert list(TokenRow.from_json(sent["cond"]).tokens) == expected["tokens.cond"].tolist()
    if wish.images:
        encoded = engine.results("encode_references")
        assert all(result == encoded[0] for result in encoded) and len(encoded[0]["keys"]) == len(wish.images)


@pytest.mark.parametrize("case", ["instruct_t2i_think_recaption_auto", "instruct_ti2i_recaption_ar"])
def test_unedited_text_gives_the_same_row_and_its_prefix_is_reused(case: str) -> None:
    """The loop through text, preview and Encode: same tokens as no detour; one edited word is another row."""
    _, expected, _ = read(case)
    engine, wish, outcome, _ = run(case)
    references = prepare_references(engine, wish.images, seed=wish.reference_seed)

    def tokens(cot_text: str) -> list[int]:
        positive, negative = build_conditionings(
            engine,
            prompt=wish.prompt,
            system_prompt=wish.custom_system_prompt.strip() or None,
            cot_text=cot_text,
            height=outcome.height,
            width=outcome.width,
            references=references,
        )
        assert len(positive.row.tokens) == len(negative.row.tokens)
        return list(positive.row.tokens)

    assert tokens(outcome.cot_text) == expected["tokens.cond"].tolist()
    assert tokens(outcome.cot_text.replace("the", "two").replace("trees", "birds")) != tokens(outcome.cot_text)
    (saved,) = engine.results("sample")
    (text,) = engine.results("generate_text")
    # The picture's row is tokenized again from the text, so it may part from the generated tokens; up to there nothing is computed again.
    generated = [*text["prompt_tokens"], *text["tokens"][:-1]]
    row = expected["tokens.cond"].tolist()
    shared = next((i for i, (a, b) in enumerate(zip(generated, row, strict=False)) if a != b), len(generated))
    assert saved["reused_tokens"] == shared >= len(text["prompt_tokens"])
    assert saved["reused_tokens"] < saved["prefix_tokens"]
