"""System prompts in text files: which ones ComfyUI's input folder holds, what they say, and when they have changed.

Only files that lie directly in the input folder can be chosen, and no link that leads elsewhere, so a workflow from somebody else cannot
read any other file of this machine. Read on rank 0 alone; the text travels to the ranks.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

from ..models.hunyuan_image_3.system_prompts import SystemPromptError, read_prompt_text
from . import host_compat

PREFIX = "file: "
SUFFIXES = (".txt", ".md")


def file_choices() -> list[str]:
    """One entry of the system prompt widget for each text file; none in a process without a ComfyUI."""
    folder = host_compat.input_folder()
    if folder is None or not folder.is_dir():
        return []
    return sorted(PREFIX + path.name for path in folder.iterdir() if _is_text_file(path))


def is_file_choice(choice: str) -> bool:
    """Raises SystemPromptError for a value that is no text, which a hand-written workflow or a wire may bring."""
    if not isinstance(choice, str):
        raise SystemPromptError(f"system_prompt is {_short(repr(choice))}, which is no text; give it the name of a system prompt.")
    return choice.startswith(PREFIX)


def prompt_file_text(choice: str) -> str:
    """The text behind an entry. Raises SystemPromptError for a file that is not in the input folder, is no text, is too large or empty."""
    text = read_prompt_text(_prompt_file(choice))
    if not text.strip():
        raise SystemPromptError(f"The system prompt file {choice.removeprefix(PREFIX)} is empty; write a text into it or choose 'None'.")
    return text


def fingerprint(choice: str | None) -> str:
    """Changes with the content of the chosen file. None is a choice that comes over a wire and is not known yet: any file may be meant."""
    if choice is None:
        return ",".join(fingerprint(each) for each in file_choices())
    try:
        if not is_file_choice(choice):
            return ""
        return f"{choice} {sha256(prompt_file_text(choice).encode()).hexdigest()}"
    except SystemPromptError as error:
        return str(error)  # the node runs and says it


class ReadsSystemPrompt:
    """For nodes with a system_prompt widget: a changed file runs it again, one that cannot be used is refused before a run."""

    @classmethod
    def IS_CHANGED(cls, system_prompt: str | None = "", **others: Any) -> str:
        return fingerprint(system_prompt)

    @classmethod
    def VALIDATE_INPUTS(cls, system_prompt: str | None = None) -> bool | str:
        """The host leaves the check of this one widget to us. True, or the sentence that it shows."""
        if system_prompt is None:
            return True
        choices = cls.INPUT_TYPES()["optional"]["system_prompt"][0]
        try:
            if is_file_choice(system_prompt):
                prompt_file_text(system_prompt)
            elif system_prompt not in choices:
                return f"The system prompt {_short(system_prompt)!r} does not exist; choose one of {', '.join(choices)}."
        except SystemPromptError as error:
            return str(error)
        return True


def _prompt_file(choice: str) -> Path:
    name = choice.removeprefix(PREFIX)
    folder = host_compat.input_folder()
    # A plain name: nothing that could lead out of the folder.
    plain = name == Path(name).name and not name.startswith(".")
    if folder is None or not plain or not _is_text_file(folder / name):
        raise SystemPromptError(
            f"The system prompt file {_short(name)!r} is not a {' or '.join(SUFFIXES)} file in ComfyUI's input folder; "
            "put it there (the file itself, not a link) and refresh the page, or choose another system prompt."
        )
    return folder / name


def _is_text_file(path: Path) -> bool:
    """Whether it can be chosen; a link counts as what it leads to."""
    try:
        real = path.resolve()
        inside = real.parent == path.parent.resolve()
        return inside and all(each.suffix.lower() in SUFFIXES and not each.name.startswith(".") for each in (path, real)) and real.is_file()
    except (OSError, RuntimeError, ValueError):  # a name that no file system takes, links in a circle
        return False


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]}…"
