"""The rolling digest: what changes it, and how the first difference is told."""

from __future__ import annotations

import json

import pytest

from phase_parallel.parallel.ledger import ROLES, Ledger, first_difference


def record(ledger: Ledger, site: str = "x", **changes: object) -> None:
    entry = {"phase": "denoise", "role": "row_reduce", "shape": (2, 3), "dtype": "torch.float32", "order": ()} | changes
    ledger.record(entry["phase"], entry["role"], site, entry["shape"], entry["dtype"], entry["order"])


def filled(*sites: str, tail_length: int = 512) -> Ledger:
    ledger = Ledger(tail_length)
    for site in sites:
        record(ledger, site)
    return ledger


def test_equal_calls_give_equal_digests() -> None:
    assert filled("a", "b").digest() == filled("a", "b").digest()
    assert filled().digest() == Ledger().digest()


@pytest.mark.parametrize(
    "change",
    [
        {"site": "y"},
        {"phase": "decode"},
        {"role": "kv_gather"},
        {"shape": (3, 2)},
        {"shape": (6,)},
        {"dtype": "torch.bfloat16"},
        {"order": (0, 1)},
    ],
)
def test_every_part_of_an_entry_counts(change: dict) -> None:
    plain, other = Ledger(), Ledger()
    record(plain)
    record(other, **change)
    assert plain.digest() != other.digest()


def test_order_and_number_of_calls_count() -> None:
    digests = {filled(*sites).digest() for sites in [("a", "b"), ("b", "a"), ("a",), ("a", "b", "b"), ()]}
    assert len(digests) == 5


def test_order_of_a_gather_counts() -> None:
    first, second = Ledger(), Ledger()
    record(first, order=(0, 2, 1, 3))
    record(second, order=(0, 1, 2, 3))
    assert first.digest() != second.digest()


def test_digest_is_two_signed_64_bit_numbers() -> None:
    for sites in ("a", "b", "c", "d"):
        halves = filled(sites).digest()
        assert len(halves) == 2 and all(-(2**63) <= half < 2**63 for half in halves)


def test_counts_by_role_and_reset() -> None:
    ledger = filled("a", "b")
    record(ledger, role="vocab_gather")
    assert ledger.counts == {"row_reduce": 2, "vocab_gather": 1}
    ledger.reset()
    assert ledger.counts == {} and ledger.digest() == Ledger().digest() and ledger.tail() == {"first": 0, "entries": []}


def test_notes_count_in_the_digest_but_not_as_collectives() -> None:
    one, other = Ledger(), Ledger()
    one.note("prefill", "row a")
    other.note("prefill", "row b")
    assert one.digest() != other.digest() and one.counts == {}
    assert first_difference([one.tail(), one.tail(), other.tail()]).endswith("but rank 2 made `prefill takes row b`")


def test_what_was_put_down_counts_when_it_is_repeated() -> None:
    """A step that is recorded is made with each replay, and a rank that launches it has made the same."""
    recording, launching = filled("a"), filled("a")
    with recording.apart() as entries:
        recording.record("denoise", "row_reduce", "b", (2, 3), "torch.float32")
    assert recording.digest() == launching.digest() and recording.counts["row_reduce"] == 2
    for _ in range(2):
        launching.record("denoise", "row_reduce", "b", (2, 3), "torch.float32")
        recording.repeat(entries)
        assert recording.digest() == launching.digest() and recording.tail() == launching.tail()


def test_an_error_while_putting_down_leaves_the_ledger_as_it_was() -> None:
    ledger = filled("a")
    with pytest.raises(KeyError), ledger.apart():
        raise KeyError
    ledger.note("denoise", "b")
    assert ledger.tail()["entries"][-1] == "denoise takes b"


def test_roles_are_those_of_the_design() -> None:
    design = {"row_reduce", "vocab_gather", "seq_to_heads", "heads_to_seq", "kv_gather", "seq_gather", "cfg_gather", "broadcast"}
    assert set(ROLES) == design | {"halo_gather", "norm_gather", "picture_gather"}


def test_tail_keeps_the_last_entries_and_is_json() -> None:
    tail = json.loads(json.dumps(filled("a", "b", "c", tail_length=2).tail()))
    assert tail["first"] == 1
    assert tail["entries"] == [f"denoise row_reduce {site} 2x3 torch.float32" for site in "bc"]


class TestFirstDifference:
    def told(self, *ledgers: Ledger) -> str:
        return first_difference([ledger.tail() for ledger in ledgers])

    def test_names_the_odd_rank_and_both_sites(self) -> None:
        told = self.told(filled("a", "b"), filled("a", "b"), filled("a", "c"), filled("a", "b"))
        usual, odd = (f"`denoise row_reduce {site} 2x3 torch.float32`" for site in "bc")
        assert told == f"at collective 1 most ranks made {usual} but rank 2 made {odd}"

    def test_rank_that_made_one_less(self) -> None:
        assert self.told(filled("a", "b"), filled("a"), filled("a", "b")).endswith("but rank 1 made `nothing`")

    def test_two_odd_ranks(self) -> None:
        told = self.told(filled("a"), filled("x"), filled("a"), filled("a"), filled("y"))
        assert "rank 1 made `denoise row_reduce x" in told and "rank 4 made `denoise row_reduce y" in told

    def test_tails_of_other_lengths_are_laid_side_by_side(self) -> None:
        long = filled("a", "b", "c", "d", tail_length=2)
        assert self.told(filled("a", "b", "c", "d"), long, filled("a", "b", "c", "e")).startswith("at collective 3 ")

    def test_difference_that_is_no_longer_kept(self) -> None:
        pair = filled("a", "c", "d", tail_length=2), filled("b", "c", "d", tail_length=2)
        assert self.told(*pair) == "the ranks differ before the entries that are still kept"
