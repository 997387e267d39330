"""Which system prompt a row gets: the user's type, the text that belongs to it, the whitespace rule.

The official texts are not part of this pack. They are read, as data, from the `system_prompt.py` that lies in
the checkpoint folder; that file is parsed and never executed. Imports the standard library only.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Literal

from ...parallel.folder_files import why_not_read

SYSTEM_PROMPT_TYPES = (
    "None",
    "dynamic",
    "en_vanilla",
    "en_recaption",
    "en_think_recaption",
    "en_unified",
    "custom",
)
OFFICIAL_FILE = "system_prompt.py"
_OFFICIAL_TYPES = SYSTEM_PROMPT_TYPES[2:6]
_TYPE_WORDS = {"vanilla", "recaption", "think", "unified"}
_DYNAMIC = {"think": "en_think_recaption", "recaption": "en_recaption", "image": "en_vanilla"}
_LARGEST_FILE = 1 << 20


class SystemPromptError(ValueError):
    """A system prompt was asked for whose text is not there or cannot be read."""


def resolve_system_prompt(
    folder: str | Path,
    prompt_type: str,
    *,
    kind: Literal["base", "instruct", "distil"],
    task: str,
    custom: str = "",
) -> str | None:
    """The final system prompt for the rows, or None for no system block.

    `custom` is the user's own text. "dynamic" chooses by `task` and falls to the custom text for tasks without
    an official one (think_recaption among them, as in the releases). Instruct and Distil strip whitespace at
    both ends, base keeps the text as it is. Raises SystemPromptError for an unknown type or a text that cannot
    be found.
    """
    if prompt_type not in SYSTEM_PROMPT_TYPES:
        raise SystemPromptError(
            f'The system prompt type "{prompt_type}" is unknown; choose one of '
            f"{', '.join(SYSTEM_PROMPT_TYPES)}."
        )
    if prompt_type == "None":
        return None
    source = Path(folder) / OFFICIAL_FILE
    name = _DYNAMIC.get(task, "custom") if prompt_type == "dynamic" else prompt_type
    text = custom if name == "custom" else official_prompt(source, name)
    if prompt_type == "dynamic" and name == "en_vanilla":
        text = text.strip("\n")
    return clean_system_prompt(text, kind)


def clean_system_prompt(text: str | None, kind: Literal["base", "instruct", "distil"]) -> str | None:
    """Apply the releases' whitespace rule to a system prompt; an empty one becomes None."""
    if text is not None and kind != "base":
        text = text.strip()
    return text or None


def official_prompt(source: Path, prompt_type: str) -> str:
    """The stored text of one official type, unstripped. Raises SystemPromptError if it is not there."""
    if not source.is_file():
        raise SystemPromptError(
            f"The system prompt {prompt_type} is read from {source}, which is missing; copy the official "
            f"{OFFICIAL_FILE} there, or choose custom or a file with a text of your own."
        )
    texts = _official_texts(source)
    if prompt_type not in texts:
        raise SystemPromptError(
            f"{source} has no system prompt {prompt_type} (found: {', '.join(sorted(texts)) or 'none'}); "
            "choose another type or the file of another release."
        )
    return texts[prompt_type]


def read_prompt_text(path: Path) -> str:
    """The text of a UTF-8 file, without the byte order mark that some editors write. Raises SystemPromptError with a sentence."""
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise SystemPromptError(f"{path} is larger than 1 MB; a system prompt is a short text file.")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SystemPromptError(
            f"The system prompt file {path} cannot be read ({error}); give a UTF-8 text file."
        ) from error


def _official_texts(source: Path) -> dict[str, str]:
    """Official types found among the module's string constants, by table keys, else by variable names."""
    reason = why_not_read(source)
    if reason:
        raise SystemPromptError(f"{source} {reason}.")
    try:
        module = ast.parse(read_prompt_text(source), filename=str(source))
    except (SyntaxError, ValueError) as error:
        raise SystemPromptError(
            f"{source} is not a Python file ({error}); copy the official {OFFICIAL_FILE} again."
        ) from error
    strings: dict[str, str] = {}
    tables: dict[str, str] = {}
    for statement in module.body:
        if isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets, value = [statement.target], statement.value
        else:
            continue
        text = _text(value, strings)
        for target in targets:
            if isinstance(target, ast.Name) and text is not None:
                strings[target.id] = text
        if isinstance(value, ast.Dict):
            for key, item in zip(value.keys, value.values, strict=True):
                entry = _text(item, strings)
                if isinstance(key, ast.Constant) and key.value in _OFFICIAL_TYPES and entry is not None:
                    tables[str(key.value)] = entry
    return {**_by_name(strings), **tables}


def _by_name(strings: dict[str, str]) -> dict[str, str]:
    """Match variables such as `..._en_recaption` or `unified_..._en` to types by the words in their names."""
    found: dict[str, str] = {}
    for name, text in strings.items():
        words = set(name.lower().split("_"))
        for prompt_type in _OFFICIAL_TYPES:
            wanted = set(prompt_type.split("_"))
            if "en" in words and words & _TYPE_WORDS == wanted & _TYPE_WORDS:
                found.setdefault(prompt_type, text)
    return found


def _text(node: ast.expr, strings: dict[str, str]) -> str | None:
    """The string a constant expression stands for; None for anything that would have to be executed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Name):
        return strings.get(node.id)
    if isinstance(node, (ast.List, ast.Tuple)) and node.elts:
        return _text(node.elts[0], strings)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left, strings), _text(node.right, strings)
        return None if left is None or right is None else left + right
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "strip"
        and not node.args
        and not node.keywords
    ):
        inner = _text(node.func.value, strings)
        return None if inner is None else inner.strip()
    return None
