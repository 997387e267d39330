"""Every word, sign and mark that the texts can hold, read off their tables: what a tokenizer of the mini model needs. Imports its neighbours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields

from .captions import capital
from .words import LANGUAGES

_PIECE = re.compile(r"[A-Za-z]+|[0-9]|[^\sA-Za-z0-9]")
_SLOT = re.compile(r"\{(\w+)\}")


def pieces(text: str) -> list[str]:
    """A text in its smallest parts: English words, single digits, Chinese signs and punctuation marks; spaces are left out."""
    return _PIECE.findall(text)


def vocabulary() -> tuple[str, ...]:
    """All pieces of all texts, sorted, each once."""
    found: set[str] = set()
    for words in LANGUAGES.values():
        for field in fields(words):
            for text in _strings(getattr(words, field.name)):
                found.update(pieces(_SLOT.sub(" ", text)))
        for word in (*words.articles, *words.counts):  # what a sentence may begin with
            found.update(pieces(capital(word)))
    return tuple(sorted(found | {piece.lower() for piece in found}))


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)
