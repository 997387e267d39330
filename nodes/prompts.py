"""Texts as the user typed them: what is refused, and which system prompt the widgets mean."""

from __future__ import annotations

from ..models.hunyuan_image_3.system_prompts import (
    OFFICIAL_FILE,
    SYSTEM_PROMPT_TYPES,
    official_prompt,
    resolve_system_prompt,
)
from ..models.hunyuan_image_3.tokenizer import refuse_empty_prompt
from .engine_handle import EngineHandle

CHECKPOINT_DEFAULT = "checkpoint default"
SYSTEM_PROMPT_CHOICES = (CHECKPOINT_DEFAULT, *SYSTEM_PROMPT_TYPES)

COT_TAGS = ("<think>", "</think>", "<recaption>", "</recaption>")


def check_prompt(engine: EngineHandle, prompt: str) -> None:
    """Raises PromptError for an empty prompt and for text that the tokenizer would read as control tokens."""
    refuse_empty_prompt(prompt)
    engine.tokenizer.refuse_special_tokens(prompt, "the prompt")


def check_cot_text(engine: EngineHandle, cot_text: str) -> None:
    """The model's own turn may have its tags, and nothing else that acts as a control token. Raises
    PromptError.
    """
    engine.tokenizer.refuse_special_tokens(cot_text, "cot_text", allowed=COT_TAGS)


def system_prompt_text(engine: EngineHandle, choice: str, custom: str, task: str) -> str | None:
    """The system prompt of the rows, or None. `task` is the model's name of the task, which "dynamic" depends
    on.

    Raises SystemPromptError for a text that the checkpoint folder lacks, PromptError for control tokens in a
    custom text.
    """
    if choice == CHECKPOINT_DEFAULT:
        choice = engine.config.generation.use_system_prompt
    if choice in ("custom", "dynamic"):
        engine.tokenizer.refuse_special_tokens(custom, "custom_system_prompt")
    return resolve_system_prompt(engine.folder, choice, kind=engine.config.kind, task=task, custom=custom)


def recaption_prompt(engine: EngineHandle) -> str:
    """The official ``en_recaption`` text as it is stored, unstripped. Raises SystemPromptError if the
    checkpoint folder lacks it.
    """
    return official_prompt(engine.folder / OFFICIAL_FILE, "en_recaption")
