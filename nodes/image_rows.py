"""From checked texts and a size to the two rows of a picture, as conditionings."""

from __future__ import annotations

from ..models.hunyuan_image_3.sequence import ImageRows, build_image_rows
from .conditioning import RowConditioning
from .engine_handle import EngineHandle


def picture_rows(
    engine: EngineHandle, *, prompt: str, system_prompt: str | None, cot_text: str, height: int, width: int
) -> ImageRows:
    """Token rows of the nearest table size. Raises SequenceError when they are too long."""
    return build_image_rows(
        engine.tokenizer,
        engine.config,
        prompt=prompt,
        system_prompt=system_prompt,
        cot_text=cot_text or None,
        cond_images=(),
        height=height,
        width=width,
    )


def build_conditionings(
    engine: EngineHandle, *, prompt: str, system_prompt: str | None, cot_text: str, height: int, width: int
) -> tuple[RowConditioning, RowConditioning]:
    """(positive, negative). A distilled checkpoint has no unconditional row; its negative may be wired but
    not run.
    """
    rows = picture_rows(
        engine, prompt=prompt, system_prompt=system_prompt, cot_text=cot_text, height=height, width=width
    )
    guidance = engine.config.generation.diff_guidance_scale if engine.config.cfg_distilled else None
    pair = rows.cond.digest()
    summary = {
        "checkpoint": engine.name,
        "prompt": prompt,
        "system_prompt": system_prompt,
        "cot_text": cot_text,
        "width": rows.width,
        "height": rows.height,
    }
    positive = RowConditioning(
        engine, "cond", rows.cond, pair, pair, rows.height, rows.width, guidance=guidance, summary=summary
    )
    other = rows.uncond or rows.cond
    negative = RowConditioning(
        engine,
        "no_uncond" if rows.uncond is None else "uncond",
        other,
        other.digest(),
        pair,
        rows.height,
        rows.width,
        guidance=guidance,
        summary=summary,
    )
    return positive, negative
