"""Ask: a question about pictures, or a plain question, answered in words by the model's text side."""

from __future__ import annotations

from typing import Any

from ..models.hunyuan_image_3.operations import text_request
from ..models.hunyuan_image_3.text_generation import prefill_row
from . import host_compat, inputs
from .progress import NodeProgress
from .prompt_files import ReadsSystemPrompt
from .prompts import CHECKPOINT_DEFAULT, check_prompt, system_prompt_text
from .references import prepare_references
from .text_socket import HunyuanText, engine_of_clip
from .text_stage import Sampling, cut_note, speed_line

CHAT_TASK = "auto"


class HunyuanImage3Ask(ReadsSystemPrompt):
    DESCRIPTION = (
        "Asks an Instruct checkpoint about one to three pictures (or without pictures) and gives the answer as text. "
        "It uses the same resident weights as the pictures, on all ranks."
    )
    CATEGORY = inputs.CATEGORY
    RETURN_TYPES = ("STRING",)
    RETURN_NAMES = ("answer",)
    OUTPUT_TOOLTIPS = ("The model's answer.",)
    FUNCTION = "ask"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"clip": inputs.clip(), "question": inputs.question()},
            "optional": {
                "seed": inputs.seed("Seed of the drawn tokens."),
                "system_prompt": inputs.system_prompt(),
                "custom_system_prompt": inputs.custom_system_prompt(),
                **inputs.sampling(),
                **inputs.images(),
                "reference_seed": inputs.reference_seed(),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def ask(
        self,
        clip: HunyuanText,
        question: str,
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
        engine = engine_of_clip(clip)
        check_prompt(engine, question)
        if engine.config.kind == "base":
            raise ValueError(f"{engine.name} is a base checkpoint, which answers no questions; load an Instruct checkpoint.")
        references = prepare_references(engine, (image1, image2, image3), seed=reference_seed)
        report = NodeProgress(unique_id)
        sampling = Sampling(do_sample, temperature, top_k, top_p, repetition_penalty)
        args = {
            "prompt": question,
            "system_prompt": system_prompt_text(engine, system_prompt, custom_system_prompt, CHAT_TASK),
            "cot_text": None,
            "task": CHAT_TASK,
            "image_size": None,
            "max_new_tokens": max_new_tokens,
            "seed": seed,
            "references": list(references.keys),
            **sampling.resolve(engine),
        }
        prefill_row(engine.tokenizer, engine.config, text_request(args), references.cond_images)  # refused here if it is too long
        references.encode(node_id=unique_id, report=report)
        result, _ = engine.call("generate_text", args, {}, node_id=unique_id, report=report)
        answer = result["answer"]
        shown = answer
        if result["truncated"]:
            shown += f"\n({cut_note(engine, 'The answer', max_new_tokens, result)})"
        shown = "\n".join(line for line in (shown, speed_line(result)) if line)
        host_compat.show_text(shown, unique_id)
        return {"ui": {"text": [shown]}, "result": (answer,)}
