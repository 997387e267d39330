"""Texts as the user typed them: what is refused, and which system prompt the widgets mean."""

from __future__ import annotations

from ..models.hunyuan_image_3.system_prompts import (
    OFFICIAL_FILE,
    SYSTEM_PROMPT_TYPES,
    clean_system_prompt,
    official_prompt,
    resolve_system_prompt,
)
from ..models.hunyuan_image_3.text_rules import COT_TAGS
from ..models.hunyuan_image_3.tokenizer import PromptError, refuse_empty_prompt
from . import prompt_files
from .engine_handle import EngineHandle

CHECKPOINT_DEFAULT = "checkpoint default"
SYSTEM_PROMPT_CHOICES = (CHECKPOINT_DEFAULT, *SYSTEM_PROMPT_TYPES)

INSTRUCTION_TAGS = (*COT_TAGS, "<answer>", "</answer>")
"""What an instruction may name: the parts of the answer that it asks for."""


def check_prompt(engine: EngineHandle, prompt: str) -> None:
    """Raises PromptError for an empty prompt and for text that the tokenizer would read as control tokens."""
    refuse_empty_prompt(prompt)
    engine.tokenizer.refuse_special_tokens(prompt, "the prompt")


def check_cot_text(engine: EngineHandle, cot_text: str) -> str:
    """The text to use: nothing for a blank one, else as it is. The model's own turn may have its tags, and nothing else that acts as a
    control token. Raises PromptError, also where editing has left a tag without its partner or one pair inside the other: the model
    would read something else than the user sees.
    """
    if not cot_text.strip():
        return ""
    engine.tokenizer.refuse_special_tokens(cot_text, "cot_text", allowed=COT_TAGS)
    places = []
    for opening, closing in (COT_TAGS[:2], COT_TAGS[2:]):
        counts = cot_text.count(opening), cot_text.count(closing)
        if counts not in ((0, 0), (1, 1)) or cot_text.find(closing) < cot_text.find(opening):
            raise PromptError(
                f"cot_text has {counts[0]} {opening} and {counts[1]} {closing}, or has them in the wrong order; "
                "give it one pair with the text in between, or none."
            )
        if counts[0]:
            places.append((cot_text.find(opening), cot_text.find(closing), opening, closing))
    if len(places) == 2:
        (_, first_end, first, first_closing), (second_start, _, second, _) = sorted(places)
        if second_start < first_end:
            raise PromptError(
                f"cot_text has {second} at character {second_start + 1}, before the {first_closing} of its {first}; "
                f"put {first_closing} before {second}."
            )
    return cot_text


def system_prompt_text(engine: EngineHandle, choice: str, custom: str, task: str) -> str | None:
    """The system prompt of the rows, or None. `task` is the model's name of the task, which "dynamic" depends
    on.

    Raises SystemPromptError for a text that the checkpoint folder lacks or a file that cannot be used, PromptError for control tokens in a
    text of the user's own.
    """
    if prompt_files.is_file_choice(choice):
        text = prompt_files.prompt_file_text(choice)
        engine.tokenizer.refuse_special_tokens(text, f"the system prompt {choice}", allowed=INSTRUCTION_TAGS)
        return clean_system_prompt(text, engine.config.kind)
    if choice == CHECKPOINT_DEFAULT:
        choice = engine.config.generation.use_system_prompt
    if choice in ("custom", "dynamic"):
        engine.tokenizer.refuse_special_tokens(custom, "custom_system_prompt", allowed=INSTRUCTION_TAGS)
    return resolve_system_prompt(engine.folder, choice, kind=engine.config.kind, task=task, custom=custom)


def recaption_prompt(engine: EngineHandle) -> str:
    """The official ``en_recaption`` text as it is stored, unstripped. Raises SystemPromptError if the
    checkpoint folder lacks it.
    """
    return official_prompt(engine.folder / OFFICIAL_FILE, "en_recaption")
