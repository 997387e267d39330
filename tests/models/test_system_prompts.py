"""System prompts: types, whitespace, and that the official file is only ever read as data."""

from __future__ import annotations

from pathlib import Path

import pytest

from phase_parallel.models.hunyuan_image_3.system_prompts import (
    SYSTEM_PROMPT_TYPES,
    SystemPromptError,
    read_prompt_text,
    resolve_system_prompt,
)

# The layout of the official file with other texts; running it would leave a trace.
OFFICIAL = '''
import os
from pathlib import Path

Path(__file__).with_name("executed").touch()
t2i_system_prompt_en_vanilla = """
vanilla
"""
t2i_system_prompt_en_recaption = """ recaption """
t2i_system_prompt_en_think_recaption = """
think""" + " recaption\\n"
t2i_system_prompts = {
    "en_vanilla": [t2i_system_prompt_en_vanilla],
    "en_recaption": [t2i_system_prompt_en_recaption],
    "en_think_recaption": [t2i_system_prompt_en_think_recaption],
}
unified_system_prompt_en: str = """ unified
""".strip()
os.environ["X"] = "1"
def get_system_prompt(sys_type, bot_task, system_prompt=None):
    raise SystemExit
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "system_prompt.py").write_text(OFFICIAL)
    return tmp_path


def resolve(folder: Path, prompt_type: str, *, kind: str = "base", task: str = "image", **more) -> str | None:
    return resolve_system_prompt(folder, prompt_type, kind=kind, task=task, **more)


@pytest.mark.parametrize(
    ("prompt_type", "base", "instruct"),
    [
        ("None", None, None),
        ("en_vanilla", "\nvanilla\n", "vanilla"),
        ("en_recaption", " recaption ", "recaption"),
        ("en_think_recaption", "\nthink recaption\n", "think recaption"),
        ("en_unified", "unified", "unified"),
        ("custom", " mine\n", "mine"),
    ],
)
def test_types_and_whitespace(folder: Path, prompt_type: str, base: str | None, instruct: str | None) -> None:
    assert resolve(folder, prompt_type, custom=" mine\n") == base
    for kind in ("instruct", "distil"):
        assert resolve(folder, prompt_type, kind=kind, custom=" mine\n") == instruct
    assert not (folder / "executed").exists()


@pytest.mark.parametrize(
    ("task", "text"),
    [
        ("think", "\nthink recaption\n"),
        ("recaption", " recaption "),
        ("image", "vanilla"),
        ("think_recaption", "mine"),
    ],
)
def test_dynamic_follows_the_task(folder: Path, task: str, text: str) -> None:
    assert resolve(folder, "dynamic", task=task, custom="mine") == text


def test_empty_texts_give_no_block(folder: Path) -> None:
    assert resolve(folder, "custom", custom="") is None
    assert resolve(folder, "custom", kind="instruct", custom=" \n") is None
    assert resolve(folder, "dynamic", task="think_recaption") is None


def test_variable_names_alone_are_enough(folder: Path) -> None:
    lines = ['en_vanilla = "v"', 'prompt_en_recaption = ("a" "b")', "OTHER = 5", 'unified_prompt_zh = "no"']
    (folder / "system_prompt.py").write_text("\n".join(lines))
    assert resolve(folder, "en_vanilla") == "v"
    assert resolve(folder, "en_recaption") == "ab"
    with pytest.raises(
        SystemPromptError, match=r"has no system prompt en_unified \(found: en_recaption, en_vanilla\)"
    ):
        resolve(folder, "en_unified")


def test_texts_that_would_have_to_be_computed_are_not_there(folder: Path) -> None:
    (folder / "system_prompt.py").write_text('en_vanilla = open("secret").read()\nen_recaption = f"{1}"')
    for prompt_type in ("en_vanilla", "en_recaption"):
        with pytest.raises(SystemPromptError, match="found: none"):
            resolve(folder, prompt_type)


def test_text_of_a_file(tmp_path: Path) -> None:
    """Editors on Windows add a byte order mark and end lines with two characters."""
    text = tmp_path / "mine.txt"
    text.write_bytes(b"\xef\xbb\xbf from a file\r\n\xe4\xb8\xad ")
    assert read_prompt_text(text) == " from a file\n\u4e2d "
    for content, words in ((b"caf\xe9", "UTF-8"), (b"a" * ((1 << 20) + 1), "larger than 1 MB")):
        text.write_bytes(content)
        with pytest.raises(SystemPromptError, match=words):
            read_prompt_text(text)
    with pytest.raises(SystemPromptError, match="cannot be read"):
        read_prompt_text(tmp_path / "absent.txt")


def test_refusals(folder: Path, tmp_path: Path) -> None:
    assert SYSTEM_PROMPT_TYPES[0] == "None"
    with pytest.raises(SystemPromptError, match='type "en_mystery" is unknown; choose one of None'):
        resolve(folder, "en_mystery")
    with pytest.raises(SystemPromptError, match=r"missing; copy the official system_prompt\.py there"):
        resolve(tmp_path / "elsewhere", "en_unified")
    (folder / "system_prompt.py").write_text("def broken(:")
    with pytest.raises(SystemPromptError, match="is not a Python file"):
        resolve(folder, "en_unified")
