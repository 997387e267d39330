"""How a step grows with the picture, the prefix and the ranks: points of a result of ``phase-parallel bench denoise``, and what its arithmetic predicts
for numbers of ranks that nobody measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .denoise_cases import SCHEMES
from .denoise_costs import collectives_ms
from .one_rank import Transfer
from .release import RELEASE

WORLDS = (1, 2, 4, 8)
BYTES = 2
"""Of a bf16 number."""
REDUCES = {1: (1, 2), 2: (2, 2), 4: (2, 1), 8: (4, 1)}
"""Ranks -> (ranks that add up a layer, branches that each of them computes): single, TP2, TP2×CFG2, TP4×CFG2."""


@dataclass(frozen=True)
class Point:
    """``ms`` of a guided step with its collectives. ``how``: measured; alone (one rank measured, its collectives at their measured cost); predicted."""

    scheme: str
    ranks: int
    prefix: int
    image_tokens: int
    ms: float
    how: str

    @property
    def case(self) -> tuple[int, int]:
        return self.prefix, self.image_tokens


def points(result: Mapping[str, Any]) -> list[Point]:
    """The fastest row of each scheme and case; none where a collective's cost is not known."""
    best: dict[tuple[str, int, int], Point] = {}
    for row in result["rows"]:
        if "not_run" in row or (result["alone"] and row["left_out_ms"] is None):
            continue
        own = row["ms_per_step"]
        ms = own["median"] + row["left_out_ms"] if result["alone"] else own.get("slowest_rank", own["median"])
        how = "alone" if result["alone"] and SCHEMES[row["scheme"]].ranks > 1 else "measured"
        point = Point(row["scheme"], SCHEMES[row["scheme"]].ranks, row["prefix"], row["image_tokens"], ms, how)
        key = point.scheme, *point.case
        if key not in best or ms < best[key].ms:
            best[key] = point
    return list(best.values())


def predictions(result: Mapping[str, Any]) -> list[Point]:
    """For every case those of :data:`WORLDS` that no scheme ran on: what a rank computes, shared evenly by another number of ranks, and NCCL's measured
    times. The rank with the most ranks beside it is the one to start from."""
    known = points(result)
    found = []
    for case in sorted({point.case for point in known}):
        here = [point for point in known if point.case == case]
        ranks = max(point.ranks for point in here)
        start = min((point for point in here if point.ranks == ranks), key=lambda point: point.ms)
        computed = start.ms - (reductions_ms(result, ranks, case[1]) or 0.0)
        for world in WORLDS:
            reductions = reductions_ms(result, world, case[1])
            if reductions is not None and all(point.ranks != world for point in here):
                found.append(Point(f"{world} rank{'s' * (world > 1)}", world, *case, computed * ranks / world + reductions, "predicted"))
    return found


def reductions_ms(result: Mapping[str, Any], ranks: int, image_tokens: int) -> float | None:
    """The two sums of every layer; what else is exchanged once a step is small beside them. None where nothing was measured."""
    group, branches = REDUCES[ranks]
    if group == 1:
        return 0.0
    nbytes = branches * (image_tokens + 1) * result.get("hidden_size", RELEASE.hidden) * BYTES
    return collectives_ms({Transfer("all_reduce", group, nbytes): 2 * result["layers"]})


def print_scaling(result: Mapping[str, Any]) -> None:
    """ms of a step by scheme, a line for each picture and a column for each prefix."""
    known, guessed = points(result), predictions(result)
    prefixes = sorted({point.prefix for point in known})
    if len({point.case for point in known}) < 2:
        return
    print("   ms of a step with its collectives; columns: tokens of the prefix; *: predicted from what was measured, by arithmetic and NCCL's measured times")
    print(f"{'':28}" + "".join(f"{prefix:>10}" for prefix in prefixes))
    for tokens in sorted({point.image_tokens for point in known}):
        for name in dict.fromkeys(point.scheme for point in (*known, *guessed)):
            by_prefix = {point.prefix: point for point in (*known, *guessed) if (point.scheme, point.image_tokens) == (name, tokens)}
            cells = (f"{by_prefix[p].ms:9.1f}{'*' if by_prefix[p].how == 'predicted' else ' '}" if p in by_prefix else f"{'':10}" for p in prefixes)
            if by_prefix:
                print(f"{tokens:6} tokens {name:17}" + "".join(cells))
