"""The shipped checkpoints become complete folders that load, and what is missing is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from phase_parallel.models.hunyuan_image_3.loading import LoadOptions, check_folder
from phase_parallel.parallel.plan import make_plan
from phase_parallel.train.errors import MiniError
from phase_parallel.train.mini import NAMES, Kind
from phase_parallel.train.mini_folder import SHIPPED, mini_folder

INDEX = "model.safetensors.index.json"


@pytest.fixture
def copy(shipped: Path, tmp_path: Path) -> Path:
    """To be damaged."""
    return Path(shutil.copytree(shipped, tmp_path / "copy"))


def last_shard(folder: Path) -> str:
    return max(json.loads((folder / INDEX).read_text())["weight_map"].values())


@pytest.mark.parametrize("kind", NAMES)
def test_the_folder_is_complete(kind: Kind, shipped: Path, tmp_path: Path) -> None:
    folder = mini_folder(kind, tmp_path, shipped=shipped)
    assert folder == tmp_path / NAMES[kind]
    check_folder(folder, make_plan("single", world_size=1), LoadOptions("fp32"))
    assert not any(path.is_symlink() for path in folder.iterdir()), "the loader takes no link out of its folder"


def test_distil_shares_the_last_shard_of_instruct(shipped: Path, tmp_path: Path) -> None:
    folder = mini_folder("distil", tmp_path, shipped=shipped)
    name = last_shard(folder)
    assert not (shipped / NAMES["distil"] / name).exists()
    assert (folder / name).read_bytes() == (shipped / NAMES["instruct"] / last_shard(shipped / NAMES["instruct"])).read_bytes()


def test_a_file_system_without_links_gets_copies(shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError("no links here")

    monkeypatch.setattr("phase_parallel.train.mini_folder.os.link", refuse)
    folder = mini_folder("distil", tmp_path, shipped=shipped)
    assert (folder / last_shard(folder)).stat().st_nlink == 1
    made = (folder / "config.json").stat().st_ctime_ns
    assert mini_folder("distil", tmp_path, shipped=shipped) == folder and (folder / "config.json").stat().st_ctime_ns == made


def test_another_version_replaces_the_folder(copy: Path, tmp_path: Path) -> None:
    first = mini_folder("instruct", tmp_path / "state", shipped=copy)
    (first / "left over").touch()
    newer = copy / NAMES["instruct"] / "system_prompt.py"
    newer.unlink()
    newer.write_text("# newer\n")
    second = mini_folder("instruct", tmp_path / "state", shipped=copy)
    assert (second / "system_prompt.py").read_text() == "# newer\n" and not (second / "left over").exists()


def lose(copy: Path, kind: Kind, name: str) -> None:
    (copy / NAMES[kind] / name).unlink()


@pytest.mark.parametrize("name", ["tokenizer.json", INDEX])
def test_a_missing_file_is_named(name: str, copy: Path, tmp_path: Path) -> None:
    lose(copy, "instruct", name)
    with pytest.raises(MiniError, match=rf"{NAMES['instruct']} lacks {name}; get it again from where this pack came from\.$"):
        mini_folder("instruct", tmp_path / "state", shipped=copy)
    assert not (tmp_path / "state").exists()


def test_a_missing_shard_is_named(copy: Path, tmp_path: Path) -> None:
    lose(copy, "distil", "model-00001-of-00003.safetensors")
    with pytest.raises(MiniError, match=r"lacks model-00001-of-00003\.safetensors, which its model\.safetensors\.index\.json names"):
        mini_folder("distil", tmp_path / "state", shipped=copy)


def test_distil_says_that_it_needs_the_shard_of_instruct(copy: Path, tmp_path: Path) -> None:
    lose(copy, "instruct", last_shard(copy / NAMES["instruct"]))
    with pytest.raises(MiniError, match=rf"lacks model-.*, which {NAMES['distil']} needs too"):
        mini_folder("distil", tmp_path / "state", shipped=copy)


def test_shards_of_two_trainings_do_not_go_together(copy: Path, tmp_path: Path) -> None:
    index = copy / NAMES["instruct"] / INDEX
    written = json.loads(index.read_text())
    del written["weight_map"]["vae.decoder.conv_out.bias"]
    index.write_text(json.dumps(written))
    with pytest.raises(MiniError, match="hold other keys, but should be one file"):
        mini_folder("distil", tmp_path / "state", shipped=copy)


def test_a_pack_without_checkpoints_says_so(tmp_path: Path) -> None:
    with pytest.raises(MiniError, match=r"comes without the mini checkpoints; make them with `phase-parallel train`"):
        mini_folder("distil", tmp_path, shipped=tmp_path / "nowhere")


def test_a_checkpoint_that_is_missing_beside_the_other_is_named(shipped: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(shipped, tmp_path / "shipped")
    shutil.rmtree(copy / NAMES["distil"])
    with pytest.raises(MiniError, match=rf"is missing, so there is no {NAMES['distil']}; get it again"):
        mini_folder("distil", tmp_path / "state", shipped=copy)


@pytest.mark.parametrize("kind", NAMES)
def test_the_trained_checkpoints_are_complete(kind: Kind, tmp_path: Path) -> None:
    check_folder(mini_folder(kind, tmp_path), make_plan("single", world_size=1), LoadOptions("fp32"))


def test_the_trained_checkpoints_stay_small() -> None:
    sizes = {path: path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()}
    assert max(sizes.values()) <= 10e6 and sum(sizes.values()) <= 14e6, sizes


@pytest.mark.parametrize("text", ["[]", '{"weight_map": []}', '{"weight_map": {"a": []}}'])
def test_an_index_of_another_kind_is_named(text: str, copy: Path, tmp_path: Path) -> None:
    (copy / NAMES["instruct"] / INDEX).write_text(text)
    with pytest.raises(MiniError, match=rf"{INDEX} cannot be read .*; get it again"):
        mini_folder("instruct", tmp_path / "state", shipped=copy)


def test_what_lies_in_the_way_is_replaced_or_named(shipped: Path, tmp_path: Path) -> None:
    (tmp_path / NAMES["distil"]).write_text("a file")
    (tmp_path / NAMES["instruct"]).symlink_to(tmp_path)
    assert all((mini_folder(kind, tmp_path, shipped=shipped) / INDEX).is_file() for kind in NAMES)
    (tmp_path / "file").touch()
    with pytest.raises(MiniError, match=r"cannot be put into .*; make that place writable"):
        mini_folder("distil", tmp_path / "file", shipped=shipped)
