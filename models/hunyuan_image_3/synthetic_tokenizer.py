"""A toy tokenizer with the official special names, for synthetic checkpoints: one token per ASCII character.

Ids mean nothing and differ from the releases on purpose. Imports the `tokenizers` library only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from .resolution import BASE_ROWS, EXTRA_SIZES

UNKNOWN = "[UNK]"
_CHARACTERS = ["\n", *(chr(code) for code in range(32, 127))]
_NAMES = (
    "<|endoftext|>", "<|startoftext|>", "<boi>", "<eoi>", "<img>", "<pad>", "<cfg>", "<timestep>",
    "<guidance>", "<joint_img_sep>", "<recaption>", "</recaption>", "<think>", "</think>", "<answer>",
    "</answer>",
)  # fmt: skip
_SIZES = (256, 512, 768, 1024)


def special_names(kind: Literal["base", "instruct", "distil"], image_base_size: int) -> list[str]:
    """Special tokens in id order. As in the releases, base lacks `<timestep_r>` and the extra ratio tokens,
    and the extra ratio tokens do not follow the others directly.
    """
    names = [*_NAMES, *(f"<img_size_{size}>" for size in sorted({*_SIZES, image_base_size}))]
    names += [f"<img_ratio_{k}>" for k in range(BASE_ROWS)]
    if kind != "base":
        names += ["<timestep_r>", *(f"<img_ratio_{BASE_ROWS + k}>" for k in range(len(EXTRA_SIZES)))]
    return names


def toy_tokenizer(kind: Literal["base", "instruct", "distil"], image_base_size: int) -> Tokenizer:
    """Characters first, then the special tokens; characters outside ASCII become `[UNK]`."""
    vocabulary = {text: token_id for token_id, text in enumerate([*_CHARACTERS, UNKNOWN])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    names = special_names(kind, image_base_size)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(token_id): {
            "content": token.content,
            "lstrip": token.lstrip,
            "normalized": token.normalized,
            "rstrip": token.rstrip,
            "single_word": token.single_word,
            "special": token.special,
        }
        for token_id, token in sorted(tokenizer.get_added_tokens_decoder().items())
    }
    named = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<pad>"}
    others = [entry["content"] for entry in added.values() if entry["content"] not in named.values()]
    special = {**named, "additional_special_tokens": others}
    settings = {
        **special,
        "added_tokens_decoder": added,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for name, values in (("tokenizer_config.json", settings), ("special_tokens_map.json", special)):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
