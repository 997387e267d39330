"""The golden cases under every plan, with real rank processes, through the program that `phase-parallel check` runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phase_parallel.launch.check import PRESETS, CheckOptions, run_on_ranks

EVERYWHERE = ("base_*", "modules_*")
QUICK = ("base_auto_ratio", "base_t2i_wide_cfg")


def options(golden: Path, preset: str, patterns: tuple[str, ...], **changes: object) -> CheckOptions:
    """A run of the cases that this golden folder has."""
    chosen = PRESETS[preset]
    names = sorted(path.name for path in (golden / "cases").iterdir())
    run = CheckOptions(
        golden=str(golden),
        cases=tuple(name for name in names if any(Path(name).match(pattern) for pattern in patterns)),
        ranks=chosen["ranks"],
        plan=chosen["plan"],
        denoise=chosen.get("denoise"),
        attention=chosen.get("attention", "ulysses"),
        moe_layout="micro_major",
        moe_path="multi_micro",
        cfg_mode="batched",
        reuse_text=True,
        device="cpu",
    )
    return replace(run, **changes)


def assert_all_ok(run: CheckOptions) -> None:
    rows = run_on_ranks(run)
    assert [row["case"] for row in rows] == list(run.cases) != []
    for row in rows:
        assert not row.get("error"), f"{row['case']}: {row.get('error')}"
        bad = [f"{t['tensor']} {t['error']:.2e} {t['note']}" for t in row["tensors"] if not t["ok"]]
        assert not bad, f"{row['case']}: {bad}"


def test_every_case_on_one_rank(golden_dir: Path) -> None:
    assert_all_ok(options(golden_dir, "single", ("*",)))


@pytest.mark.ranks4
@pytest.mark.timeout(900)
@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "single"])
def test_base_cases_under_every_plan(golden_dir: Path, preset: str) -> None:
    """Ranks compare the digest of all results at the end of each case, so this also shows equal bits on all ranks."""
    assert_all_ok(options(golden_dir, preset, EVERYWHERE))


@pytest.mark.ranks4
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("hybrid-sp-ulysses", {"moe_layout": "expert_major", "reuse_text": False}),
        ("hybrid-sp-kv", {"moe_path": "two_dispatch", "cfg_mode": "serial"}),
    ],
    ids=["expert_major without text reuse", "two_dispatch with serial guidance"],
)
def test_ablations_give_the_same_numbers(golden_dir: Path, preset: str, changes: dict[str, object]) -> None:
    assert_all_ok(options(golden_dir, preset, QUICK, **changes))
