"""Rows without a tokenizer: positions, attention slices, JSON and digest on a hand-made row."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from phase_parallel.models.hunyuan_image_3.token_row import CondSpan, GenSpan, TokenRow, dense_mask


def places(positions: torch.Tensor) -> list[tuple[int, int]]:
    return [(y, x) for y, x in positions.tolist()]


def span_row() -> TokenRow:
    """Texts, a picture (vae 4..10, separator 10, vit 11..17), texts, then the generated picture 2 x 3."""
    cond = CondSpan(3, (4, 10), (2, 3), (11, 17), (2, 2))
    return TokenRow(tuple(range(28)), (cond,), GenSpan(20, None, None, (21, 27), (2, 3)))


def test_positions_are_centred_and_floored() -> None:
    row = TokenRow(tuple(range(17)), (), GenSpan(9, None, None, (10, 16), (2, 3)))
    positions = places(row.positions("joint_full"))
    assert positions[10] == (12, 11)  # x0 = floor(11.5)
    assert positions[15] == (13, 13)
    assert positions[9] == (9, 9)
    assert positions[16] == (16, 16)
    assert places(row.positions("joint_full", rope_type="default")) == [(i, i) for i in range(17)]


@pytest.mark.parametrize(
    ("cond_attn", "slices", "vae_is_grid", "vit_is_grid"),
    [
        ("joint_full", ((4, 17), (21, 27)), True, True),
        ("full", ((4, 10), (11, 17), (21, 27)), True, True),
        ("full_causal", ((4, 10), (21, 27)), True, False),
        ("causal", ((21, 27),), False, False),
    ],
)
def test_cond_attention_decides_slices_and_grids(cond_attn, slices, vae_is_grid, vit_is_grid) -> None:
    row = span_row()
    assert row.full_slices(cond_attn) == slices
    positions = places(row.positions(cond_attn))
    assert (positions[4] != (4, 4)) == vae_is_grid
    assert (positions[12] != (12, 12)) == vit_is_grid
    assert positions[15:17] == [(15, 15), (16, 16)]  # padding patches keep the plain index
    mask = dense_mask(row, cond_attn)
    assert mask[21:27, 21:27].all()
    assert not mask[20, 21:].any()
    assert not mask[:20, 20:].any()


def test_row_survives_json_and_digest_sees_every_field() -> None:
    row = span_row()
    again = TokenRow.from_json(json.loads(json.dumps(row.to_json())))
    assert again == row and again.digest() == row.digest()
    others = [
        replace(row, tokens=row.tokens[:-1] + (0,)),
        replace(row, cond=()),
        replace(row, gen=replace(row.gen, grid=(3, 2))),
        replace(row, cond=(replace(row.cond[0], vit_grid=(1, 4)),)),
    ]
    assert len({row.digest(), *(other.digest() for other in others)}) == 5


def test_equal_tokens_in_a_row_travel_as_one_entry() -> None:
    """A picture has thousands of them, and every step of a stock sampler sends them."""
    row = TokenRow((7, 7, 7, 5, 9, 9, *[3] * 4096, 5), (), None)
    sent = json.dumps(row.to_json())
    assert len(sent) < 100
    assert TokenRow.from_json(json.loads(sent)) == row
