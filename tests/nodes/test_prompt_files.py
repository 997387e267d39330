"""System prompts from text files in ComfyUI's input folder: choice, reading, refusals, and when a node runs again."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from lone_engine import RecordingHandle, lone_engine

from phase_parallel.nodes import host_compat
from phase_parallel.nodes.checkpoint_folders import fingerprint as checkpoint_fingerprint
from phase_parallel.nodes.engine_handle import EngineHandle
from phase_parallel.nodes.node_ask import HunyuanImage3Ask
from phase_parallel.nodes.node_encode import HunyuanImage3Encode
from phase_parallel.nodes.node_generate import HunyuanImage3Generate
from phase_parallel.nodes.node_rewrite import HunyuanImage3Rewrite
from phase_parallel.nodes.prompts import system_prompt_text
from phase_parallel.nodes.text_socket import HunyuanText
from phase_parallel.nodes.vae_socket import HunyuanVae

NODES = (HunyuanImage3Ask, HunyuanImage3Encode, HunyuanImage3Generate, HunyuanImage3Rewrite)
MINE = "file: mine.txt"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """ComfyUI's input folder, with a picture, a script, a hidden file and a subfolder beside the text."""
    inputs = tmp_path / "input"
    (inputs / "notes.txt").mkdir(parents=True)
    for name in ("photo.png", "run.py", ".hidden.txt", "Other.MD"):
        (inputs / name).write_text("x")
    (inputs / "mine.txt").write_text("  Draw what I say.\n")
    (tmp_path / "secret.txt").write_text("secret")
    monkeypatch.setattr(host_compat, "input_folder", lambda: inputs)
    return inputs


@pytest.fixture
def instruct_engine(small_instruct: Path) -> RecordingHandle:
    return lone_engine(small_instruct)


@pytest.mark.parametrize("node", NODES)
def test_every_node_offers_the_text_files_after_the_official_names(node: type, folder: Path) -> None:
    choices, options = node.INPUT_TYPES()["optional"]["system_prompt"]
    assert choices[0] == options["default"] == "checkpoint default"
    assert choices[-3:] == ["custom", "file: Other.MD", MINE]


def test_without_a_comfyui_there_are_no_files() -> None:
    assert HunyuanImage3Encode.INPUT_TYPES()["optional"]["system_prompt"][0][-1] == "custom"


def test_the_file_becomes_the_row_of_the_same_custom_text(folder: Path, instruct_engine: RecordingHandle) -> None:
    clip, vae = HunyuanText(instruct_engine), HunyuanVae(instruct_engine)

    def tokens(**chosen: str) -> tuple[int, ...]:
        positive, _, _ = HunyuanImage3Encode().encode(clip, vae, "a dog", 256, 256, **chosen)
        return positive[0][1]["hunyuan_image_3_row"].row.tokens

    wanted = tokens(system_prompt="custom", custom_system_prompt="Draw what I say.")
    assert tokens(system_prompt=MINE, custom_system_prompt="not this") == wanted != tokens(system_prompt="None")


def test_whitespace_follows_the_release(folder: Path, instruct_engine: RecordingHandle, engine: EngineHandle) -> None:
    assert system_prompt_text(instruct_engine, MINE, "", "image") == "Draw what I say."
    assert system_prompt_text(engine, MINE, "", "image") == "  Draw what I say.\n"


def test_instructions_may_name_the_parts_of_the_answer(folder: Path, engine: EngineHandle) -> None:
    text = "Write <think> and <recaption>, then <answer>."
    (folder / "mine.txt").write_text(text)
    assert system_prompt_text(engine, MINE, "", "image") == text
    assert system_prompt_text(engine, "custom", text, "image") == text
    (folder / "mine.txt").write_text("Write <img>.")
    with pytest.raises(ValueError, match=r"system prompt file: mine\.txt contains <img>"):
        system_prompt_text(engine, MINE, "", "image")


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("file: absent.txt", "is not a .txt or .md file in ComfyUI's input folder; put it there"),
        ("file: ../secret.txt", "is not a"),
        ("file: photo.png", "is not a"),
        ("file: run.py", "is not a"),
        ("file: .hidden.txt", "is not a"),
        ("file: notes.txt", "is not a"),
        ("file: ", "is not a"),
        ("file: " + "n" * 300 + ".txt", "^The system prompt file 'n{80}…' is not a"),
        ("file: a\0b.txt", "is not a"),
        ("file: out.txt", "the file itself, not a link"),
        ("file: picture.txt", "is not a"),
        ("file: circle.txt", "is not a"),
        ("file: latin.txt", "give a UTF-8 text file"),
        ("file: large.txt", "larger than 1 MB"),
        ("file: blank.txt", "is empty"),
    ],
)
def test_other_files_are_refused_before_anything_runs(folder: Path, engine: EngineHandle, choice: str, words: str) -> None:
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "large.txt").write_bytes(b"a" * ((1 << 20) + 1))
    (folder / "blank.txt").write_text(" \n")
    for link, target in (("out.txt", "../secret.txt"), ("picture.txt", "photo.png"), ("circle.txt", "circle.txt")):
        (folder / link).symlink_to(target)
    assert re.search(words, str(HunyuanImage3Rewrite.VALIDATE_INPUTS(system_prompt=choice)))
    with pytest.raises(ValueError, match=words):
        system_prompt_text(engine, choice, "", "image")


def test_links_are_offered_by_what_they_lead_to(folder: Path, engine: EngineHandle) -> None:
    (folder / "out.txt").symlink_to("../secret.txt")
    (folder / "same.txt").symlink_to("mine.txt")
    choices = HunyuanImage3Rewrite.INPUT_TYPES()["optional"]["system_prompt"][0]
    assert "file: same.txt" in choices and "file: out.txt" not in choices
    assert system_prompt_text(engine, "file: same.txt", "", "image") == system_prompt_text(engine, MINE, "", "image")


@pytest.mark.parametrize("value", [5, True, ["x"], 1.5])
def test_a_value_that_is_no_text_is_a_sentence(engine: EngineHandle, value: object) -> None:
    for node in NODES:
        assert str(node.VALIDATE_INPUTS(system_prompt=value)).startswith(f"system_prompt is {value!r}, which is no text; give it")
        assert "is no text" in node.IS_CHANGED(system_prompt=value)
    with pytest.raises(ValueError, match="is no text"):
        system_prompt_text(engine, value, "", "image")


def test_an_absolute_path_is_refused(folder: Path, engine: EngineHandle) -> None:
    secret = folder.parent / "secret.txt"
    assert secret.is_file()
    with pytest.raises(ValueError, match="is not a"):
        system_prompt_text(engine, f"file: {secret}", "", "image")


def test_the_other_choices_stay_valid(folder: Path) -> None:
    known = ("checkpoint default", "None", "en_unified", "custom", MINE)
    for node in NODES:
        assert all(node.VALIDATE_INPUTS(system_prompt=choice) is True for choice in known)
        assert node.VALIDATE_INPUTS(system_prompt=None) is True, "a wire: nothing is known yet"
        assert "does not exist; choose one of" in node.VALIDATE_INPUTS(system_prompt="en_mystery")


@pytest.mark.parametrize("node", NODES)
def test_a_changed_file_runs_the_node_again(node: type, folder: Path) -> None:
    path = folder / "mine.txt"

    def state(choice: str | None = MINE) -> str:
        return node.IS_CHANGED(system_prompt=choice, clip=None, prompt="a dog", unique_id="3")

    first, wired, plain = state(), state(None), state("custom")
    os.utime(path, (1, 1))
    assert state() == first, "the same words are the same text"
    stamp = path.stat().st_mtime_ns
    path.write_text("  Draw what I sai.\n")
    os.utime(path, ns=(stamp, stamp))
    assert state() != first, "same length and time, other words"
    assert state(None) != wired
    assert state("custom") == plain == ""
    path.unlink()
    assert "is not a" in state()


def test_a_changed_official_file_loads_the_words_again(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / name).write_text("{}")
    without = checkpoint_fingerprint(tmp_path)
    official = tmp_path / "system_prompt.py"
    official.write_text("")
    first = checkpoint_fingerprint(tmp_path)
    os.utime(official, (1, 1))
    assert len({without, first, checkpoint_fingerprint(tmp_path)}) == 3
