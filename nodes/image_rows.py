"""From checked texts and a size to the two rows of a picture, as conditionings."""

from __future__ import annotations

from hashlib import sha256

from ..models.hunyuan_image_3.sequence import ImageRows, build_image_rows
from ..models.hunyuan_image_3.text_rules import keep_recaption
from ..models.hunyuan_image_3.token_row import TokenRow
from .conditioning import RowConditioning
from .engine_handle import EngineHandle
from .prompts import recaption_prompt
from .references import References, no_references


def picture_rows(
    engine: EngineHandle,
    *,
    prompt: str,
    system_prompt: str | None,
    cot_text: str,
    height: int,
    width: int,
    references: References | None = None,
) -> ImageRows:
    """Token rows of the nearest table size. Raises SequenceError when they are too long.

    Checkpoints with ``drop_think`` leave the thinking out of the picture's row, and give the model the
    instruction of a recaption where it had one for thinking.
    """
    if cot_text and engine.config.generation.drop_think:
        cot_text = keep_recaption(cot_text)
        system_prompt = system_prompt and recaption_prompt(engine)
    return build_image_rows(
        engine.tokenizer,
        engine.config,
        prompt=prompt,
        system_prompt=system_prompt,
        cot_text=cot_text or None,
        cond_images=() if references is None else references.cond_images,
        height=height,
        width=width,
    )


def build_conditionings(
    engine: EngineHandle,
    *,
    prompt: str,
    system_prompt: str | None,
    cot_text: str,
    height: int,
    width: int,
    references: References | None = None,
) -> tuple[RowConditioning, RowConditioning]:
    """(positive, negative). A distilled checkpoint has no unconditional row; its negative may be wired but
    not run.
    """
    references = references or no_references(engine)
    rows = picture_rows(
        engine,
        prompt=prompt,
        system_prompt=system_prompt,
        cot_text=cot_text,
        height=height,
        width=width,
        references=references,
    )
    guidance = engine.config.generation.diff_guidance_scale if engine.config.cfg_distilled else None
    pair = "".join([rows.cond.digest(), *references.keys])
    summary = {
        "checkpoint": engine.name,
        "prompt": prompt,
        "system_prompt": system_prompt,
        "cot_text": cot_text,
        "width": rows.width,
        "height": rows.height,
    }
    positive = RowConditioning(
        engine,
        "cond",
        rows.cond,
        _digest(rows.cond, references),
        pair,
        rows.height,
        rows.width,
        guidance=guidance,
        summary=summary,
        references=references,
    )
    other = rows.uncond or rows.cond
    negative = RowConditioning(
        engine,
        "no_uncond" if rows.uncond is None else "uncond",
        other,
        _digest(other, references),
        pair,
        rows.height,
        rows.width,
        guidance=guidance,
        summary=summary,
        references=references,
    )
    return positive, negative


def _digest(row: TokenRow, references: References) -> str:
    """Names a row and its pictures: two prompts with equal words and other pictures are two rows."""
    return sha256("".join([row.digest(), *references.keys]).encode()).hexdigest()
