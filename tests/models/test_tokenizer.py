"""The tokenizer: special tokens by name, texts as sections, and refusals that name what is missing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from phase_parallel.models.hunyuan_image_3.config import HunyuanImage3Config
from phase_parallel.models.hunyuan_image_3.synthetic import SyntheticSpec, write_settings
from phase_parallel.models.hunyuan_image_3.tokenizer import (
    HunyuanTokenizer,
    PromptError,
    TokenizerError,
    refuse_empty_prompt,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_settings(tmp_path / "instruct", SyntheticSpec(kind="instruct"))
    return tmp_path / "instruct"


@pytest.fixture
def config(folder: Path) -> HunyuanImage3Config:
    return HunyuanImage3Config.from_folder(folder)


@pytest.fixture
def tokenizer(folder: Path, config: HunyuanImage3Config) -> HunyuanTokenizer:
    return HunyuanTokenizer.from_folder(folder, config)


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_golden_vocabularies(golden_dir: Path) -> None:
    for folder in sorted((golden_dir / "checkpoints").iterdir()):
        config = HunyuanImage3Config.from_folder(folder)
        tokenizer = HunyuanTokenizer.from_folder(folder, config)
        assert len(tokenizer.ratio_ids) == (33 if config.kind == "base" else 37)
        assert tokenizer.has_extra_ratios == (config.kind != "base")
        for k, token_id in enumerate(tokenizer.ratio_ids):
            assert tokenizer.encode(f"<img_ratio_{k}>") == [token_id]
        assert (tokenizer.special.timestep_r is None) == (config.kind == "base")
        text = "<think>the dog: a cat's\n\n</think>"
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ratio_ids_need_not_be_contiguous(tokenizer: HunyuanTokenizer) -> None:
    ids = tokenizer.ratio_ids
    assert ids[32] - ids[0] == 32
    assert ids[33] != ids[32] + 1
    assert tokenizer.decode([ids[33], ids[0]]) == "<img_ratio_33><img_ratio_0>"


def test_no_automatic_special_tokens(tokenizer: HunyuanTokenizer) -> None:
    assert tokenizer.encode("") == []
    assert len(tokenizer.encode("a cat")) == 5
    assert tokenizer.encode("<boi>x")[0] == tokenizer.special.boi


def test_special_tokens_in_a_users_text_are_found_and_refused(tokenizer: HunyuanTokenizer) -> None:
    text = "a <img> in <b>bold</b> <img></think>"
    assert tokenizer.find_special_tokens(text) == ["<img>", "</think>"]
    with pytest.raises(
        PromptError, match=r"^The prompt contains <img>, </think>, which .*; remove or rewrite"
    ):
        tokenizer.refuse_special_tokens(text, "the prompt")
    tokenizer.refuse_special_tokens("<b> 1 < 2 <img_ratio_99>", "the prompt")
    tokenizer.refuse_special_tokens("<think>a</think>", "cot_text", allowed=("<think>", "</think>"))


def test_texts_that_cannot_be_used(tokenizer: HunyuanTokenizer) -> None:
    for empty in ("", " \n\t"):
        with pytest.raises(PromptError, match="The prompt is empty; write"):
            refuse_empty_prompt(empty)
    refuse_empty_prompt("a")
    with pytest.raises(PromptError, match="invalid character at position 1"):
        tokenizer.encode("a\ud800")


@pytest.mark.parametrize(
    "name",
    [
        "<boi>",
        "<|startoftext|>",
        "<timestep>",
        "<img_size_256>",
        "<img_ratio_7>",
        "<img_ratio_35>",
        "<joint_img_sep>",
    ],
)
def test_a_missing_needed_token_is_named(folder: Path, config: HunyuanImage3Config, name: str) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        edit(folder / file, f'"{name}"', '"<other>"')
    with pytest.raises(TokenizerError, match=f"no token {name.replace('|', '.')}, which .* needs"):
        HunyuanTokenizer.from_folder(folder, config)


def test_distil_tokens_are_needed_by_distil_only(tmp_path: Path) -> None:
    write_settings(tmp_path / "base", SyntheticSpec(kind="base"))
    config = HunyuanImage3Config.from_folder(tmp_path / "base")
    assert HunyuanTokenizer.from_folder(tmp_path / "base", config).special.timestep_r is None
    distilled = replace(config, cfg_distilled=True, use_meanflow=True)
    with pytest.raises(TokenizerError, match="no token <timestep_r>, which use_meanflow needs"):
        HunyuanTokenizer.from_folder(tmp_path / "base", distilled)


def test_tokenizer_of_another_checkpoint_is_refused(folder: Path, config: HunyuanImage3Config) -> None:
    with pytest.raises(TokenizerError, match=r"but config\.json says vocab_size 100"):
        HunyuanTokenizer.from_folder(folder, replace(config, vocab_size=100))
    with pytest.raises(TokenizerError, match=r"gives <img> id .* config\.json says 5"):
        HunyuanTokenizer.from_folder(folder, replace(config, image_token_id=5))


def test_missing_and_damaged_files(folder: Path, config: HunyuanImage3Config) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="cannot be read"):
        HunyuanTokenizer.from_folder(folder, config)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match="is missing; download"):
        HunyuanTokenizer.from_folder(folder, config)


def test_tokens_that_only_the_settings_file_lists_are_added(
    folder: Path, config: HunyuanImage3Config
) -> None:
    """As the Hugging Face loader does; the last token of the toy vocabulary stands for them."""
    whole = json.loads((folder / "tokenizer.json").read_text())
    last = whole["added_tokens"].pop()
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    tokenizer = HunyuanTokenizer.from_folder(folder, config)
    assert tokenizer.encode(last["content"]) == [last["id"]] == [tokenizer.ratio_ids[36]]
    edit(folder / "tokenizer_config.json", f'"{last["id"]}":', '"9000":')
    with pytest.raises(TokenizerError, match="the id 9000, which does not follow"):
        HunyuanTokenizer.from_folder(folder, config)


def test_clean_up_is_done_only_where_the_settings_ask(folder: Path, config: HunyuanImage3Config) -> None:
    ids = HunyuanTokenizer.from_folder(folder, config).encode("a dog , it 's .")
    assert HunyuanTokenizer.from_folder(folder, config).decode(ids) == "a dog , it 's ."
    edit(
        folder / "tokenizer_config.json",
        '"clean_up_tokenization_spaces": false',
        '"clean_up_tokenization_spaces": true',
    )
    assert HunyuanTokenizer.from_folder(folder, config).decode(ids) == "a dog, it's."
