"""The mini model's tokenizer: whole words where the texts of this room use them, single characters for everything else a person may type.

An English word is two tokens, with and without the space before it, so that decoding gives the text back exactly. Imports the `tokenizers` library and
its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from ..models.hunyuan_image_3.synthetic_tokenizer import special_names
from .scenes import BASE_SIZE
from .vocabulary import pieces, vocabulary

UNKNOWN = "[UNK]"
CHARACTERS = ("\n", *(chr(code) for code in range(32, 127)))
ROLES = ("User: ", "Assistant: ")
SYSTEM_PROMPTS = {
    "t2i_system_prompt_en_vanilla": "Draw what the user wants.",
    "t2i_system_prompt_en_recaption": "Describe the picture, then draw it.",
    "t2i_system_prompt_en_think_recaption": "Think, describe the picture, then draw it.",
    "unified_system_prompt_en": "Draw or change pictures as the user wants.",
}
"""What stands in the checkpoint's system_prompt.py, by the official names."""


def mini_tokenizer(kind: Literal["instruct", "distil"]) -> Tokenizer:
    """Characters, then words and signs, then the special tokens. What is none of them becomes `[UNK]`, sign by sign."""
    ids = {text: number for number, text in enumerate(dict.fromkeys((*CHARACTERS, UNKNOWN, *_words())))}
    # An empty prefix lets the parts of an unknown word be any known ones; of several the longest.
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token=UNKNOWN, continuing_subword_prefix="", max_input_chars_per_word=1 << 20))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[A-Za-z]+| ?[0-9]|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special_names(kind, BASE_SIZE)])
    return tokenizer


def _words() -> Iterator[str]:
    for piece in dict.fromkeys((*vocabulary(), *(piece for text in (*ROLES, *SYSTEM_PROMPTS.values()) for piece in pieces(text)))):
        yield piece
        if piece.isascii() and piece.isalnum():
            yield f" {piece}"
