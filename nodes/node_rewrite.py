"""Think / Recaption: the model decides the picture's proportions and, in Instruct checkpoints, writes the
text that guides it.
"""

from __future__ import annotations

from typing import Any

from . import host_compat, inputs, size_choices
from .progress import NodeProgress
from .prompt_files import ReadsSystemPrompt
from .prompts import CHECKPOINT_DEFAULT
from .text_socket import HunyuanText, engine_of_clip
from .text_stage import Sampling, TextWish, run_text_stage


class HunyuanImage3Rewrite(ReadsSystemPrompt):
    DESCRIPTION = (
        "Lets the model prepare its own picture: choose the proportions ('auto ratio') and, with Instruct "
        "checkpoints, think and rewrite the "
        "prompt. Connect the outputs to HunyuanImage-3.0 Encode; the text can be edited on the way."
    )
    CATEGORY = inputs.CATEGORY
    RETURN_TYPES = ("STRING", "STRING", "INT", "INT")
    RETURN_NAMES = ("cot_text", "recaption", "width", "height")
    OUTPUT_TOOLTIPS = (
        "Everything the model wrote, with its tags; for Encode. Empty for 'off' and 'auto ratio'.",
        "The rewritten prompt alone, for reading.",
        "Width of the picture in pixels.",
        "Height of the picture in pixels.",
    )
    FUNCTION = "rewrite"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "clip": inputs.clip(),
                "prompt": inputs.prompt(),
                "task": inputs.task("auto ratio"),
            },
            "optional": {
                "size": inputs.size(),
                "width": inputs.width(),
                "height": inputs.height(),
                "seed": inputs.seed("Seed of the drawn tokens."),
                "system_prompt": inputs.system_prompt(),
                "custom_system_prompt": inputs.custom_system_prompt(),
                **inputs.sampling(),
                **inputs.images(),
                "reference_seed": inputs.reference_seed(),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def rewrite(
        self,
        clip: HunyuanText,
        prompt: str,
        task: str,
        size: str = size_choices.AUTO,
        width: int = 1024,
        height: int = 1024,
        seed: int = 0,
        system_prompt: str = CHECKPOINT_DEFAULT,
        custom_system_prompt: str = "",
        max_new_tokens: int = 2048,
        do_sample: str = CHECKPOINT_DEFAULT,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 0.0,
        repetition_penalty: float = 0.0,
        image1: Any = None,
        image2: Any = None,
        image3: Any = None,
        reference_seed: int = 0,
        unique_id: str | None = None,
    ) -> dict[str, Any]:
        wish = TextWish(
            prompt=prompt,
            task=task,
            system_prompt=system_prompt,
            custom_system_prompt=custom_system_prompt,
            size=size,
            width=width,
            height=height,
            max_new_tokens=max_new_tokens,
            seed=seed,
            sampling=Sampling(do_sample, temperature, top_k, top_p, repetition_penalty),
            images=(image1, image2, image3),
            reference_seed=reference_seed,
            for_encode=True,
        )
        outcome = run_text_stage(
            engine_of_clip(clip), wish, node_id=unique_id, report=NodeProgress(unique_id)
        )
        text = outcome.recaption or f"{outcome.width} x {outcome.height}"
        line = "\n".join(part for part in (outcome.note, text, outcome.speed) if part)
        host_compat.show_text(line, unique_id)
        return {
            "ui": {"text": [line]},
            "result": (outcome.cot_text, outcome.recaption, outcome.width, outcome.height),
        }
