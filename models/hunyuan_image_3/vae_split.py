"""Which rows of a picture belong to whom: the pure arithmetic of a VAE that runs on several ranks. No tensors here.

A row is one of the latent, 16 of the picture, so that every change of size stays within a piece.
"""

from __future__ import annotations

from dataclasses import dataclass


def deal(total: int, parts: int) -> tuple[int, ...]:
    """``total`` things in ``parts`` shares that differ by at most one, larger shares first. Fewer things than parts: one share each."""
    assert total > 0 and parts > 0, (total, parts)
    base, more = divmod(total, min(total, parts))
    return tuple(base + (i < more) for i in range(min(total, parts)))


def spans(heights: tuple[int, ...]) -> tuple[slice, ...]:
    """The places of consecutive pieces of these heights."""
    stops = [sum(heights[: i + 1]) for i in range(len(heights))]
    return tuple(slice(stop - height, stop) for stop, height in zip(stops, heights, strict=True))


def bands(height: int, most: int, unit: int = 1) -> tuple[slice, ...]:
    """The fewest spans of ``height`` rows with at most ``most`` each (but never less than ``unit``), all of them multiples of ``unit``."""
    assert height % unit == 0, (height, unit)
    units = height // unit
    shares = deal(units, -(-units // max(most // unit, 1)))
    return spans(tuple(share * unit for share in shares))


@dataclass(frozen=True)
class RowSplit:
    """The pieces of one picture, from its top to its bottom, and the piece of one rank.

    A picture of fewer rows than ranks has one piece a row. The ranks that are left over do the last piece once more and nobody takes it from
    them: so they make every collective with the right shapes, and a tiny picture costs them nothing that others would not wait for anyway.
    """

    heights: tuple[int, ...]
    mine: int

    @classmethod
    def of(cls, height: int, *, ranks: int, rank: int) -> RowSplit:
        heights = deal(height, ranks)
        return cls(heights, min(rank, len(heights) - 1))

    @property
    def height(self) -> int:
        return sum(self.heights)

    @property
    def tallest(self) -> int:
        return max(self.heights)

    @property
    def shares(self) -> tuple[float, ...]:
        """What part of the picture each piece is."""
        return tuple(height / self.height for height in self.heights)

    @property
    def above(self) -> int | None:
        """The piece above this rank's, None at the picture's top."""
        return self.mine - 1 if self.mine > 0 else None

    @property
    def below(self) -> int | None:
        return self.mine + 1 if self.mine + 1 < len(self.heights) else None

    def rows(self, scale: int = 1) -> slice:
        """This rank's rows where a latent row is ``scale`` rows."""
        place = spans(self.heights)[self.mine]
        return slice(place.start * scale, place.stop * scale)
