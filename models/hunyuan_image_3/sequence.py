"""From prompt, system prompt, assistant text and pictures to token rows: the templates of the releases.

Every text section is tokenized on its own. The texts come here in their final form: whitespace rules of
system prompts are in `system_prompts`, refusals of what a user may not type in `tokenizer`. Pure; imports
nothing but its neighbours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from .config import HunyuanImage3Config
from .resolution import ResolutionTable
from .token_row import CondSpan, GenSpan, Grid, SequenceError, TokenRow, dense_mask, rope_tables
from .tokenizer import HunyuanTokenizer

__all__ = [
    "CondImage",
    "CondSpan",
    "GenSpan",
    "ImageRows",
    "SequenceError",
    "TokenRow",
    "build_image_rows",
    "build_text_row",
    "dense_mask",
    "resolution_table",
    "rope_tables",
]

TextTask = Literal["auto", "think", "recaption", "img_ratio"]
USER_ROLE = "User: "
ASSISTANT_ROLE = "Assistant: "
TURN_END = "\n\n"
_COT_PAIR = re.compile(r"<(think|recaption)>(.*?)</\1>", re.DOTALL)


@dataclass(frozen=True)
class CondImage:
    """What a row needs of a conditioning picture: ratio, latent grid, real patch grid, slots with padding."""

    ratio_index: int
    vae_grid: Grid
    vit_grid: Grid
    vit_slots: int


@dataclass(frozen=True)
class ImageRows:
    """Conditional row, unconditional row of equal length (None for Distil), actual size of the picture."""

    cond: TokenRow
    uncond: TokenRow | None
    height: int
    width: int
    ratio_index: int


def resolution_table(config: HunyuanImage3Config, tokenizer: HunyuanTokenizer) -> ResolutionTable:
    """The size table of a checkpoint: its vocabulary decides whether the Instruct rows exist."""
    return ResolutionTable(config.image_base_size, extra=tokenizer.has_extra_ratios)


def build_image_rows(
    tokenizer: HunyuanTokenizer,
    config: HunyuanImage3Config,
    *,
    prompt: str,
    system_prompt: str | None,
    cot_text: str | None,
    cond_images: tuple[CondImage, ...] | list[CondImage],
    height: int,
    width: int,
) -> ImageRows:
    """Rows of the image stage; the size is moved to the nearest row of the size table.

    `cot_text` is the assistant's text with its tags, or None. Raises SequenceError when the row is longer
    than max_position_embeddings or the checkpoint takes no pictures, ImageSizeError for a size without area.
    """
    table = resolution_table(config, tokenizer)
    ratio_index = table.nearest(height, width)
    height, width = table.size(ratio_index)
    row = _RowBuilder(tokenizer, config)
    row.open_and_user_turn(prompt, system_prompt, cond_images)
    if row.instruct:
        row.text(ASSISTANT_ROLE)
    row.assistant_text(cot_text)
    if row.instruct:
        row.token(tokenizer.special.answer)
    row.generated_picture(
        ratio_index, (height // config.vae.ffactor_spatial, width // config.vae.ffactor_spatial)
    )
    if row.instruct:
        row.token(tokenizer.special.answer_end)
        row.text(TURN_END)
    _check_length(len(row.tokens), config.max_position_embeddings, "max_position_embeddings")
    uncond = None if config.cfg_distilled else row.result(row.uncond_tokens)
    return ImageRows(row.result(row.tokens), uncond, height, width, ratio_index)


def build_text_row(
    tokenizer: HunyuanTokenizer,
    config: HunyuanImage3Config,
    *,
    prompt: str,
    system_prompt: str | None,
    cot_text: str | None,
    cond_images: tuple[CondImage, ...] | list[CondImage],
    task: TextTask,
) -> TokenRow:
    """Prefill row of the text stage: the user turn and an assistant turn left open where the model continues.

    `cot_text` is an assistant text that is already there, or None. Raises SequenceError when the row is
    longer than max_position_embeddings or the generation config's max_length.
    """
    row = _RowBuilder(tokenizer, config)
    row.open_and_user_turn(prompt, system_prompt, cond_images)
    opening = {
        "auto": "",
        "think": "<think>",
        "recaption": "<recaption>",
        "img_ratio": ("<answer>" if row.instruct else "") + "<boi>" + tokenizer.img_size_name,
    }[task]
    role = ASSISTANT_ROLE if row.instruct else ""
    if cot_text:
        row.text(role)
        row.assistant_text(cot_text)
        role = ""
    row.text(role + opening)  # one section: the role and the tags are tokenized together
    _check_length(len(row.tokens), config.max_position_embeddings, "max_position_embeddings")
    _check_length(len(row.tokens), config.generation.max_length, "max_length of generation_config.json")
    return row.result(row.tokens)


class _RowBuilder:
    """Appends sections to the conditional and the unconditional row at once: their indices always agree."""

    def __init__(self, tokenizer: HunyuanTokenizer, config: HunyuanImage3Config) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.special = tokenizer.special
        self.instruct = config.generation.sequence_template == "instruct"
        self.tokens: list[int] = []
        self.uncond_tokens: list[int] = []
        self.cond: list[CondSpan] = []
        self.gen: GenSpan | None = None

    def token(self, token_id: int, count: int = 1) -> tuple[int, int]:
        """Append one token `count` times; returns the span."""
        start = len(self.tokens)
        self.tokens += [token_id] * count
        self.uncond_tokens += [token_id] * count
        return start, start + count

    def text(self, text: str, *, blank_in_uncond: bool = False) -> None:
        ids = self.tokenizer.encode(text) if text else []
        self.tokens += ids
        self.uncond_tokens += [self.special.cfg] * len(ids) if blank_in_uncond else ids

    def open_and_user_turn(
        self, prompt: str, system_prompt: str | None, cond_images: tuple[CondImage, ...] | list[CondImage]
    ) -> None:
        if cond_images and not self.instruct:
            raise SequenceError(
                "This checkpoint's sequence template takes no input pictures; remove them or load an "
                "Instruct checkpoint."
            )
        self.token(self.special.bos)
        if system_prompt:
            self.text(system_prompt)
            if self.instruct:
                self.text(TURN_END)
        if self.instruct:
            self.text(USER_ROLE)
        for image in cond_images:
            self._conditioning_picture(image)
        self.text(prompt, blank_in_uncond=True)
        if self.instruct:
            self.text(TURN_END)

    def assistant_text(self, cot_text: str | None) -> None:
        """Each complete think or recaption pair becomes tag, body, tag; a text without one is an answer."""
        if not cot_text:
            return
        pairs = list(_COT_PAIR.finditer(cot_text))
        if not pairs:
            if self.instruct:
                self.token(self.special.answer)
            self.text(cot_text, blank_in_uncond=True)
            if self.instruct:
                self.token(self.special.answer_end)
            return
        tags = {
            "think": (self.special.think, self.special.think_end),
            "recaption": (self.special.recaption, self.special.recaption_end),
        }
        done = 0
        for pair in pairs:
            self.text(cot_text[done : pair.start()], blank_in_uncond=True)
            done = pair.end()
            if pair[1] == "think" and self.config.generation.drop_think:
                continue
            opening, closing = tags[pair[1]]
            self.token(opening)
            self.text(pair[2], blank_in_uncond=True)
            self.token(closing)
        self.text(cot_text[done:], blank_in_uncond=True)

    def generated_picture(self, ratio_index: int, grid: Grid) -> None:
        self._picture_head(ratio_index)
        timestep, _ = self.token(self.special.timestep)
        guidance = timestep_r = None
        if self.config.cfg_distilled:
            guidance, _ = self.token(
                self.tokenizer.require(self.special.guidance, "<guidance>", "cfg_distilled")
            )
        if self.config.use_meanflow:
            timestep_r, _ = self.token(
                self.tokenizer.require(self.special.timestep_r, "<timestep_r>", "use_meanflow")
            )
        image = self.token(self.special.img, grid[0] * grid[1])
        self.token(self.special.eoi)
        self.gen = GenSpan(timestep, guidance, timestep_r, image, grid)

    def _conditioning_picture(self, image: CondImage) -> None:
        patches = image.vit_grid[0] * image.vit_grid[1]
        if patches > image.vit_slots:
            raise SequenceError(
                f"An input picture has {patches} patches but {image.vit_slots} slots; "
                "make the picture smaller."
            )
        self._picture_head(image.ratio_index)
        timestep, _ = self.token(self.special.timestep)
        vae = self.token(self.special.img, image.vae_grid[0] * image.vae_grid[1])
        self.token(self.tokenizer.require(self.special.joint_img_sep, "<joint_img_sep>", "an input picture"))
        vit = self.token(self.special.img, image.vit_slots)
        self.token(self.special.eoi)
        self.cond.append(CondSpan(timestep, vae, image.vae_grid, vit, image.vit_grid))

    def _picture_head(self, ratio_index: int) -> None:
        """`<boi>`, the base size (whatever the actual size) and the ratio."""
        ratios = self.tokenizer.ratio_ids
        if not 0 <= ratio_index < len(ratios):
            raise SequenceError(
                f"Ratio index {ratio_index} is outside the size table; choose 0 to {len(ratios) - 1}."
            )
        self.token(self.special.boi)
        self.token(self.special.img_size)
        self.token(ratios[ratio_index])

    def result(self, tokens: list[int]) -> TokenRow:
        return TokenRow(tuple(tokens), tuple(self.cond), self.gen)


def _check_length(length: int, limit: int, name: str) -> None:
    if length > limit:
        raise SequenceError(
            f"The row has {length} tokens, but {name} is {limit}; shorten the prompt or the assistant text, "
            "or use fewer or smaller pictures."
        )
