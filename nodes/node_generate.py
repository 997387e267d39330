"""Generate: from a prompt to pictures in one node, with the checkpoint's own settings and the official
sampling loop.

It needs nothing of the host's samplers, so it is also the way to draw in a ComfyUI without flow sampling.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch

from . import host_compat, inputs, size_choices
from .engine_handle import EngineHandle
from .image_rows import picture_rows
from .model_socket import engine_of_model
from .progress import NodeProgress
from .prompt_files import ReadsSystemPrompt
from .prompts import CHECKPOINT_DEFAULT, check_cot_text, system_prompt_text
from .references import References, prepare_references
from .text_socket import HunyuanText, engine_of_clip
from .text_stage import Sampling, TextOutcome, TextWish, picture_task, run_text_stage
from .vae_socket import HunyuanVae, engine_of_vae


@dataclass(frozen=True)
class DrawSettings:
    """Sampler settings with the checkpoint's own values filled in. `seeds`: one per picture."""

    steps: int
    guidance: float
    flow_shift: float
    seeds: tuple[int, ...]

    @classmethod
    def resolve(
        cls,
        engine: EngineHandle,
        *,
        steps: int,
        guidance: float,
        flow_shift: float,
        seed: int,
        batch_size: int,
    ) -> DrawSettings:
        """0 stands for the checkpoint's own value; picture i of a batch gets seed + i."""
        own = engine.config.generation
        return cls(
            steps=steps or own.diff_infer_steps,
            guidance=guidance or own.diff_guidance_scale,
            flow_shift=flow_shift or own.flow_shift,
            seeds=tuple((seed + index) % (1 << 64) for index in range(batch_size)),
        )


class HunyuanImage3Generate(ReadsSystemPrompt):
    DESCRIPTION = (
        "Everything in one node: the model chooses the proportions or writes its text, draws with the "
        "official sampling loop, and decodes. "
        "0 and 'checkpoint default' follow the checkpoint. For samplers, inpainting and other nodes use "
        "Encode and KSampler instead."
    )
    CATEGORY = inputs.CATEGORY
    RETURN_TYPES = ("IMAGE", "STRING")
    RETURN_NAMES = ("image", "cot_text")
    OUTPUT_TOOLTIPS = ("The pictures.", "What the model wrote before it drew; empty if it wrote nothing.")
    FUNCTION = "generate"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": inputs.model(),
                "clip": inputs.clip(),
                "vae": inputs.vae(),
                "prompt": inputs.prompt(),
            },
            "optional": {
                "task": inputs.task("auto ratio"),
                "size": inputs.size(),
                "width": inputs.width(),
                "height": inputs.height(),
                "seed": inputs.seed(
                    "Seed of the pictures and of the model's text; picture i of a batch uses seed + i."
                ),
                "batch_size": inputs.batch_size(),
                **_draw_inputs(),
                "system_prompt": inputs.system_prompt(),
                "custom_system_prompt": inputs.custom_system_prompt(),
                **inputs.sampling(),
                "cot_text": inputs.cot_text(),
                **inputs.images(),
            },
            "hidden": {"unique_id": "UNIQUE_ID", "graph": "PROMPT"},
        }

    def generate(
        self,
        model: Any,
        clip: HunyuanText,
        vae: HunyuanVae,
        prompt: str,
        task: str = "auto ratio",
        size: str = size_choices.AUTO,
        width: int = 1024,
        height: int = 1024,
        seed: int = 0,
        batch_size: int = 1,
        steps: int = 0,
        guidance: float = 0.0,
        flow_shift: float = 0.0,
        system_prompt: str = CHECKPOINT_DEFAULT,
        custom_system_prompt: str = "",
        max_new_tokens: int = 2048,
        do_sample: str = CHECKPOINT_DEFAULT,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 0.0,
        repetition_penalty: float = 0.0,
        cot_text: str = "",
        image1: Any = None,
        image2: Any = None,
        image3: Any = None,
        unique_id: str | None = None,
        graph: dict[str, Any] | None = None,
    ) -> tuple[torch.Tensor, str]:
        engine = _one_engine(model, clip, vae)
        cot_text = check_cot_text(engine, cot_text)
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
            reference_seed=seed,
            cot_text=cot_text,
        )
        settings = DrawSettings.resolve(
            engine, steps=steps, guidance=guidance, flow_shift=flow_shift, seed=seed, batch_size=batch_size
        )
        report = NodeProgress(unique_id, engine.preview)
        outcome = run_text_stage(engine, wish, node_id=unique_id, report=report)
        system = system_prompt_text(engine, system_prompt, custom_system_prompt, picture_task(task, cot_text))
        host_compat.annotate(_metadata(engine, wish, system, outcome, settings), unique_id, graph)
        report.keep("\n".join(line for line in (outcome.note, outcome.speed) if line))
        references = prepare_references(engine, wish.images, seed=wish.reference_seed)
        latents = draw(engine, prompt, system, outcome, references, settings, report)
        return vae.decode(latents), outcome.cot_text


def draw(
    engine: EngineHandle,
    prompt: str,
    system_prompt: str | None,
    outcome: TextOutcome,
    references: References,
    settings: DrawSettings,
    report: NodeProgress,
) -> torch.Tensor:
    """Unscaled latents [n, C, h, w] of `n` seeds, by one engine run over all steps."""
    references.encode(node_id=report.node_id, report=report)
    rows = picture_rows(
        engine,
        prompt=prompt,
        system_prompt=system_prompt,
        cot_text=outcome.cot_text,
        height=outcome.height,
        width=outcome.width,
        references=references,
    )
    guided = rows.uncond is not None and settings.guidance > 1 and not engine.config.cfg_distilled
    way = engine.denoise_way(guided=guided, image_tokens=prod(rows.cond.gen.grid), prefix=rows.cond.prefix_length)
    args = {
        "way": asdict(way),
        "cond": rows.cond.to_json(),
        "uncond": None if rows.uncond is None else rows.uncond.to_json(),
        "height": rows.height,
        "width": rows.width,
        "ratio_index": rows.ratio_index,
        "references": list(references.keys),
        "steps": settings.steps,
        "guidance": settings.guidance,
        "flow_shift": settings.flow_shift,
        "seeds": list(settings.seeds),
    }
    _, tensors = engine.call("sample", args, {}, node_id=report.node_id, report=report)
    return tensors["latents"]


def _draw_inputs() -> dict[str, inputs.Widget]:
    return {
        "steps": (
            "INT",
            {
                "default": 0,
                "min": 0,
                "max": 10000,
                "tooltip": "Denoise steps. 0: the checkpoint's own number (50, Distil 8).",
            },
        ),
        "guidance": (
            "FLOAT",
            {
                "default": 0.0,
                "min": 0.0,
                "max": 30.0,
                "step": 0.1,
                "tooltip": "How closely the picture follows the prompt (cfg). 0: the checkpoint's own "
                "value. 1: no guidance, twice as fast.",
            },
        ),
        "flow_shift": (
            "FLOAT",
            {
                "default": 0.0,
                "min": 0.0,
                "max": 100.0,
                "step": 0.01,
                "tooltip": "Higher spends more steps on the composition. 0: the checkpoint's own value (3).",
            },
        ),
    }


def _one_engine(model: Any, clip: HunyuanText, vae: HunyuanVae) -> EngineHandle:
    engine = engine_of_model(model)
    if {engine_of_clip(clip).key, engine_of_vae(vae).key} != {engine.key}:
        raise ValueError(
            "model, clip and vae come from different loaders; connect all three to one Load "
            "HunyuanImage-3.0 node."
        )
    return engine


def _metadata(
    engine: EngineHandle,
    wish: TextWish,
    system_prompt: str | None,
    outcome: TextOutcome,
    settings: DrawSettings,
) -> dict[str, Any]:
    return {
        "checkpoint": engine.name,
        "prompt": wish.prompt,
        "system_prompt": system_prompt,
        "cot_text": outcome.cot_text,
        "width": outcome.width,
        "height": outcome.height,
        "seeds": list(settings.seeds),
        "steps": settings.steps,
        "guidance": settings.guidance,
        "flow_shift": settings.flow_shift,
    }
