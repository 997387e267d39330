"""The checkpoint's tokenizer and its special tokens, resolved by name. Imports the `tokenizers` library only.

Nothing here knows a token id: vocabularies differ between releases, and the ratio tokens are not contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from ...parallel.folder_files import why_not_read
from .config import HunyuanImage3Config
from .config_fields import read_json
from .resolution import BASE_ROWS, EXTRA_SIZES

# What the Hugging Face decoder does where tokenizer_config.json asks for clean_up_tokenization_spaces.
_CLEAN_UPS = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"),
    (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip
MAX_TOKENIZER_BYTES = 128 << 20
"""More than five times what the release has."""


class TokenizerError(ValueError):
    """The tokenizer files are damaged, or lack a token that the checkpoint needs."""


class PromptError(ValueError):
    """A text of the user cannot be used as it is."""


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the tokens that have a meaning in a row; None for one that this vocabulary lacks."""

    bos: int
    eos: int
    pad: int
    boi: int
    eoi: int
    img: int
    cfg: int
    timestep: int
    guidance: int | None
    timestep_r: int | None
    joint_img_sep: int | None
    img_size: int
    think: int
    think_end: int
    recaption: int
    recaption_end: int
    answer: int
    answer_end: int


_NAMES = {
    "bos": "<|startoftext|>", "eos": "<|endoftext|>", "pad": "<pad>", "boi": "<boi>", "eoi": "<eoi>",
    "img": "<img>", "cfg": "<cfg>", "timestep": "<timestep>", "think": "<think>", "think_end": "</think>",
    "recaption": "<recaption>", "recaption_end": "</recaption>", "answer": "<answer>",
    "answer_end": "</answer>",
}  # fmt: skip


class HunyuanTokenizer:
    """Text to ids and back, without automatic special tokens."""

    def __init__(
        self, tokenizer: Tokenizer, config: HunyuanImage3Config, *, clean_up: bool, where: str
    ) -> None:
        """Resolve every special token that `config` needs. Raises TokenizerError naming the missing one."""
        self._tokenizer = tokenizer
        self._clean_up = clean_up
        self._where = where
        self.special = self._resolve(config)
        self.img_size_name = f"<img_size_{config.image_base_size}>"
        extra = tokenizer.token_to_id(f"<img_ratio_{BASE_ROWS}>") is not None
        count = BASE_ROWS + (len(EXTRA_SIZES) if extra else 0)
        self.ratio_ids = tuple(self._id(f"<img_ratio_{k}>", "the size table") for k in range(count))
        added = {
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self._special_ids = (
            added | set(self.ratio_ids) | {i for i in vars(self.special).values() if i is not None}
        )
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values())
        if largest >= config.vocab_size:
            raise TokenizerError(
                f"{where} has token id {largest}, but config.json says vocab_size {config.vocab_size}; "
                "use the tokenizer files that belong to this checkpoint."
            )

    @classmethod
    def from_folder(cls, path: str | Path, config: HunyuanImage3Config) -> HunyuanTokenizer:
        """Read `tokenizer.json` (and `tokenizer_config.json` where present) of a checkpoint folder.

        Raises TokenizerError: file missing or damaged, a needed special token unknown, ids beyond the
        vocabulary, or ids that contradict config.json.
        """
        file = Path(path) / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(f"{file} is missing; download the complete checkpoint folder.")
        reason = why_not_read(file, MAX_TOKENIZER_BYTES)
        if reason:
            raise TokenizerError(f"{file} {reason}.")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception for every kind of damage
            raise TokenizerError(f"{file} cannot be read ({error}); download it again.") from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        settings_file = file.with_name("tokenizer_config.json")
        settings = read_json(settings_file) if settings_file.is_file() else {}
        _add_missing(tokenizer, settings.get("added_tokens_decoder") or {}, str(settings_file))
        return cls(
            tokenizer, config, clean_up=settings.get("clean_up_tokenization_spaces") is True, where=str(file)
        )

    @property
    def has_extra_ratios(self) -> bool:
        """Whether the vocabulary has the ratio tokens of the Instruct size table."""
        return len(self.ratio_ids) > BASE_ROWS

    def encode(self, text: str) -> list[int]:
        """Ids of one text section; strings of special tokens inside it are recognised, as in the releases.

        Raises PromptError when the text is not valid Unicode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise PromptError(
                f"The text has an invalid character at position {error.start}; remove it."
            ) from error
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens written out."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        if self._clean_up:
            for spaced, joined in _CLEAN_UPS:
                text = text.replace(spaced, joined)
        return text

    def find_special_tokens(self, text: str) -> list[str]:
        """The special tokens that `encode` would recognise in a text, each once, in order of appearance."""
        found = [self._tokenizer.id_to_token(i) for i in self.encode(text) if i in self._special_ids]
        return list(dict.fromkeys(found))

    def refuse_special_tokens(self, text: str, where: str, *, allowed: Sequence[str] = ()) -> None:
        """Raise PromptError when a user's text contains strings that would act as special tokens.

        `where` names the input ("the prompt", or a socket as it is spelled); `allowed` lists what is fine there (the tags of a given CoT).
        """
        found = [name for name in self.find_special_tokens(text) if name not in allowed]
        if found:
            subject = f"The {where[4:]}" if where.startswith("the ") else where
            raise PromptError(
                f"{subject} contains {', '.join(found)}, which the model reads as "
                "control tokens and not as text; remove or rewrite them."
            )

    def require(self, token_id: int | None, name: str, purpose: str) -> int:
        """Narrow an optional special token. Raises TokenizerError when the vocabulary lacks it."""
        if token_id is None:
            raise TokenizerError(
                f"{self._where} has no token {name}, which {purpose} needs; "
                "use the tokenizer files that belong to this checkpoint."
            )
        return token_id

    def _resolve(self, config: HunyuanImage3Config) -> SpecialTokens:
        named = {field: self._id(name, "every row") for field, name in _NAMES.items()}
        for field, expected in (("bos", config.bos_token_id), ("img", config.image_token_id)):
            if expected is not None and expected != named[field]:
                raise TokenizerError(
                    f"{self._where} gives {_NAMES[field]} id {named[field]}, config.json says {expected}; "
                    "use the tokenizer files that belong to this checkpoint."
                )
        instruct = config.generation.sequence_template == "instruct"
        return SpecialTokens(
            **named,
            img_size=self._id(
                f"<img_size_{config.image_base_size}>", f"image_base_size {config.image_base_size}"
            ),
            guidance=self._optional("<guidance>", config.cfg_distilled, "cfg_distilled"),
            timestep_r=self._optional("<timestep_r>", config.use_meanflow, "use_meanflow"),
            joint_img_sep=self._optional("<joint_img_sep>", instruct, "the instruct template"),
        )

    def _id(self, name: str, purpose: str) -> int:
        token_id = self.require(self._tokenizer.token_to_id(name), name, purpose)
        if self.encode(name) != [token_id]:
            raise TokenizerError(f"{self._where} does not read {name} as one token; download the file again.")
        return token_id

    def _optional(self, name: str, needed: bool, purpose: str) -> int | None:
        known = self._tokenizer.token_to_id(name) is not None
        return self._id(name, purpose) if needed or known else None


def refuse_empty_prompt(text: str, where: str = "the prompt") -> None:
    """Raise PromptError when there is nothing to draw."""
    if not text.strip():
        raise PromptError(f"{where[:1].upper()}{where[1:]} is empty; write what the picture should show.")


def _add_missing(tokenizer: Tokenizer, decoder: dict[str, dict], where: str) -> None:
    """Add the tokens that only tokenizer_config.json lists; the next free ids must be the written ones."""
    for token_id in sorted(map(int, decoder)):
        entry = decoder[str(token_id)]
        content = entry.get("content")
        if content is None or tokenizer.token_to_id(content) is not None:
            continue
        options = {
            key: entry[key]
            for key in ("single_word", "lstrip", "rstrip", "normalized", "special")
            if key in entry
        }
        tokenizer.add_tokens([AddedToken(content, **options)])
        if tokenizer.token_to_id(content) != token_id:
            raise TokenizerError(
                f"{where} gives {content} the id {token_id}, which does not follow from tokenizer.json; "
                "use files of one and the same checkpoint."
            )
