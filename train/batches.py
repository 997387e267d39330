"""Which examples a training step sees: a bucket drawn by its weight, then rows of it, so many that every batch is about as much work.

Imports torch and its neighbours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from .examples import Writing
from .packing import Bucket

Shares = Mapping[tuple[int, Writing], float]


class Batches:
    """Endless batches in an order that the seed decides. ``tokens``: of a batch, padding counted."""

    def __init__(self, buckets: Sequence[Bucket], shares: Shares, *, tokens: int, seed: int) -> None:
        """``shares``: how often the rows of each (source pictures, writing) are drawn, in sum 1; among their buckets it is by size."""
        self._buckets, self._tokens = list(buckets), tokens
        self._generator = torch.Generator().manual_seed(seed)
        sizes: Counter[tuple[int, Writing]] = Counter()
        for bucket in buckets:
            sizes[_kind(bucket)] += len(bucket)
        # A batch of short rows has more of them, so its bucket is drawn less often.
        self._weights = torch.tensor([shares[_kind(bucket)] * len(bucket) / sizes[_kind(bucket)] / self.rows(bucket) for bucket in buckets])

    def rows(self, bucket: Bucket) -> int:
        """Examples of one batch."""
        return max(1, self._tokens // (bucket.tokens.shape[1] + bucket.grid[0] * bucket.grid[1]))

    def state(self) -> dict[str, torch.Tensor]:
        """Where the order stands."""
        return {"generator": self._generator.get_state()}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """To what ``state`` gave."""
        self._generator.set_state(state["generator"].cpu())

    def draw(self) -> tuple[int, torch.Tensor]:
        """The number of a bucket, and rows of it, drawn with replacement: int64 on the CPU."""
        number = int(torch.multinomial(self._weights, 1, generator=self._generator))
        bucket = self._buckets[number]
        return number, torch.randint(len(bucket), (self.rows(bucket),), generator=self._generator)

    def chosen(self, number: int, index: torch.Tensor) -> Bucket:
        """Rows of a bucket, on its device, where the index is too."""
        return self._buckets[number].chosen(index)


def _kind(bucket: Bucket) -> tuple[int, Writing]:
    return len(bucket.form.sources), bucket.form.writing
