"""Encode: prompt, text and size become the two token rows that the samplers guide with, and the latent that
fits them.
"""

from __future__ import annotations

from typing import Any

import torch

from . import host_compat, inputs
from .image_rows import build_conditionings
from .node_latent import empty_latent
from .node_noise import REFERENCE_SHAPES
from .prompt_files import ReadsSystemPrompt
from .prompts import CHECKPOINT_DEFAULT, check_cot_text, check_prompt, system_prompt_text
from .references import prepare_references
from .text_socket import HunyuanText, engine_of_clip
from .text_stage import picture_task, size_note
from .vae_socket import HunyuanVae, engine_of_vae


class HunyuanImage3Encode(ReadsSystemPrompt):
    DESCRIPTION = (
        "Prepares a prompt for the samplers. The picture size is part of what the model reads, so the node "
        "also gives the latent of that "
        "size. Its negative output is the model's own unconditional branch; there is no negative prompt."
    )
    CATEGORY = inputs.CATEGORY
    RETURN_TYPES = ("CONDITIONING", "CONDITIONING", "LATENT")
    RETURN_NAMES = ("positive", "negative", "latent")
    OUTPUT_TOOLTIPS = (
        "For the sampler's positive input.",
        "For the sampler's negative input (skipped when cfg is 1).",
        "Empty latent of the encoded size.",
    )
    FUNCTION = "encode"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "clip": inputs.clip(),
                "vae": inputs.vae(),
                "prompt": inputs.prompt(),
                "width": inputs.width(),
                "height": inputs.height(),
            },
            "optional": {
                "batch_size": inputs.batch_size(),
                "system_prompt": inputs.system_prompt(),
                "custom_system_prompt": inputs.custom_system_prompt(),
                "cot_text": inputs.cot_text(),
                **inputs.images(),
                "reference_seed": inputs.reference_seed(),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def encode(
        self,
        clip: HunyuanText,
        vae: HunyuanVae,
        prompt: str,
        width: int,
        height: int,
        batch_size: int = 1,
        system_prompt: str = CHECKPOINT_DEFAULT,
        custom_system_prompt: str = "",
        cot_text: str = "",
        image1: Any = None,
        image2: Any = None,
        image3: Any = None,
        reference_seed: int = 0,
        unique_id: str | None = None,
    ) -> tuple[list[Any], list[Any], dict[str, torch.Tensor]]:
        engine = engine_of_clip(clip)
        if engine_of_vae(vae).key != engine.key:
            raise ValueError(
                "clip and vae come from two different loaders; connect both to one Load HunyuanImage-3.0 "
                "node."
            )
        check_prompt(engine, prompt)
        cot_text = check_cot_text(engine, cot_text)
        references = prepare_references(engine, (image1, image2, image3), seed=reference_seed)
        positive, negative = build_conditionings(
            engine,
            prompt=prompt,
            system_prompt=system_prompt_text(engine, system_prompt, custom_system_prompt, picture_task("off", cot_text)),
            cot_text=cot_text,
            height=height,
            width=width,
            references=references,
        )
        note = size_note((height, width), (positive.height, positive.width))
        if note:
            host_compat.show_text(note, unique_id)
        latent = empty_latent(positive.height, positive.width, batch_size, engine.config.vae.latent_channels)
        # Reference Noise draws what the official program draws before the picture's own noise.
        latent[REFERENCE_SHAPES] = references.latent_shapes
        return positive.as_conditioning(), negative.as_conditioning(), latent
