"""The rolling digest of a rank's collectives and the sentence about the first difference."""

from __future__ import annotations

import pytest

from phase_parallel.parallel.ledger import Ledger, first_difference

ENTRY = ("denoise", "row_reduce", "layers.0.o_proj", (2, 3), "torch.float32")


def filled(*entries: tuple) -> Ledger:
    ledger = Ledger(tail_length=4)
    for entry in entries:
        ledger.record(*entry)
    return ledger


@pytest.mark.parametrize("field", range(5))
def test_every_field_counts(field: int) -> None:
    other = list(ENTRY)
    other[field] = (2, 4) if field == 3 else other[field] + "x"
    assert filled(ENTRY).digest() != filled(tuple(other)).digest()


def test_order_of_a_gather_counts() -> None:
    assert filled((*ENTRY, (0, 1))).digest() != filled((*ENTRY, (1, 0))).digest()


def test_equal_histories_are_equal_and_order_matters() -> None:
    second = ("denoise", "seq_gather", "final", (1,), "torch.float32")
    assert filled(ENTRY, second).digest() == filled(ENTRY, second).digest()
    assert filled(ENTRY, second).digest() != filled(second, ENTRY).digest()


def test_reset_forgets() -> None:
    ledger = filled(ENTRY)
    ledger.reset()
    assert ledger.digest() == Ledger().digest() and not ledger.counts


def test_the_first_difference_names_site_and_rank() -> None:
    same, odd = filled(ENTRY, ENTRY).tail(), filled(ENTRY, ("denoise", "row_reduce", "layers.0.mlp", (2, 3), "torch.float32")).tail()
    text = first_difference([same, same, odd, same])
    assert "at collective 1" in text and "rank 2 made" in text and "layers.0.mlp" in text


def test_a_missing_call_is_named() -> None:
    assert "rank 1 made `nothing`" in first_difference([filled(ENTRY, ENTRY).tail(), filled(ENTRY).tail(), filled(ENTRY, ENTRY).tail()])


def test_only_the_tail_is_kept() -> None:
    tail = filled(*[ENTRY] * 9).tail()
    assert tail["first"] == 5 and len(tail["entries"]) == 4
