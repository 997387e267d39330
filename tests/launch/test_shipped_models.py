"""The pack's own checkpoints are taken in their complete form wherever a folder is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from phase_parallel.launch import shipped_models as module
from phase_parallel.launch.cli import main
from phase_parallel.launch.errors import LaunchError
from phase_parallel.launch.shipped_models import complete_folder
from phase_parallel.launch.up import check_models
from phase_parallel.models.hunyuan_image_3.loading import LoadOptions, check_folder
from phase_parallel.parallel.plan import make_plan
from phase_parallel.train.mini import NAMES
from phase_parallel.train.mini_folder import SHIPPED


@pytest.fixture
def own(shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "SHIPPED", shipped)
    monkeypatch.setattr(module, "MINI_STATE", tmp_path / "state")
    return shipped


def test_the_pack_has_them_in_one_place() -> None:
    assert module.SHIPPED == SHIPPED


@pytest.mark.parametrize("name", NAMES.values())
def test_a_launch_gets_complete_folders(name: str, own: Path, tmp_path: Path) -> None:
    folder, other = check_models((own / name, tmp_path))
    assert folder == tmp_path / "state" / name and other == tmp_path
    check_folder(folder, make_plan("single", world_size=1), LoadOptions("fp32"))


def test_other_folders_stay(own: Path, tmp_path: Path) -> None:
    assert [complete_folder(folder) for folder in (own, own / "else", tmp_path)] == [own, own / "else", tmp_path]


def test_doctor_looks_at_the_complete_folder(own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--model", str(own / NAMES["distil"])])
    assert f"{tmp_path / 'state' / NAMES['distil']}: complete" in capsys.readouterr().out


def test_what_cannot_be_completed_is_named(own: Path, tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    with pytest.raises(LaunchError, match=r"cannot be put into .*; make that place writable"):
        complete_folder(own / NAMES["distil"])
