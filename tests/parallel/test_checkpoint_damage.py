"""Folders as people have them: truncated, mixed up, hostile. Every refusal is a sentence and comes before memory is spent."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small_folder import FIRST, SECOND, tensors, write_folder, write_index

from phase_parallel.parallel import checkpoint as module
from phase_parallel.parallel.checkpoint import INDEX_NAME, Checkpoint, CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path)


def raw_shard(path: Path, header: object, body: bytes = b"") -> None:
    """A shard with any header at all."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def describe(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def refuses(folder: Path) -> str:
    """The sentence with which the folder is refused when it is opened."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestFiles:
    def test_no_folder(self, tmp_path: Path) -> None:
        assert refuses(tmp_path / "nowhere").endswith(f"does not exist; give the folder that holds config.json and {INDEX_NAME}")

    def test_no_index(self, tmp_path: Path) -> None:
        assert f"has no {INDEX_NAME}; give the official folder as downloaded" in refuses(tmp_path)

    def test_missing_shard(self, folder: Path) -> None:
        (folder / SECOND).unlink()
        assert refuses(folder).startswith(f"shard {SECOND} is missing although {INDEX_NAME} names it; download it again into ")

    def test_broken_link_is_a_missing_shard(self, folder: Path) -> None:
        (folder / SECOND).unlink()
        (folder / SECOND).symlink_to(folder / "gone")
        assert "is missing although" in refuses(folder)

    @pytest.mark.parametrize("name", [FIRST, INDEX_NAME])
    @pytest.mark.parametrize("how", ["absolute", "relative", "by a link", "by a link to its folder"])
    def test_link_to_a_file_outside(self, folder: Path, tmp_path_factory: pytest.TempPathFactory, name: str, how: str) -> None:
        """Its content is valid, so only the place can be the reason."""
        outside = tmp_path_factory.mktemp("outside")
        (folder / name).rename(outside / name)
        target = {"absolute": outside / name, "relative": Path("..") / ".." / outside.relative_to(folder.parent.parent) / name}.get(how)
        if how == "by a link":
            (folder / "step").symlink_to(outside / name)
            target = Path("step")
        if how == "by a link to its folder":
            (folder / "step").symlink_to(outside)
            target = Path("step") / name
        (folder / name).symlink_to(target)
        assert (folder / name).is_file()
        assert "is a link to a file outside of its folder, which is not followed" in refuses(folder)

    def test_links_in_a_circle_and_to_devices(self, folder: Path) -> None:
        (folder / FIRST).unlink()
        (folder / FIRST).symlink_to(folder / "other")
        (folder / "other").symlink_to(folder / FIRST)
        assert "is missing although" in refuses(folder)
        (folder / FIRST).unlink()
        (folder / FIRST).symlink_to("/dev/zero")
        assert "is missing although" in refuses(folder)
        (folder / FIRST).unlink()
        os.mkfifo(folder / FIRST)  # opened, it would wait for ever
        assert "is missing although" in refuses(folder)

    def test_folder_in_place_of_a_shard(self, folder: Path) -> None:
        (folder / SECOND).unlink()
        (folder / SECOND).mkdir()
        assert "is missing although" in refuses(folder)

    def test_index_names_an_absent_file(self, folder: Path) -> None:
        weight_map = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
        write_index(folder, weight_map | {"extra": "model-00003-of-00003.safetensors"})
        assert refuses(folder).startswith("shard model-00003-of-00003.safetensors is missing")

    @pytest.mark.parametrize("cut", [1, 40, 10**9])
    def test_truncated_shard(self, folder: Path, cut: int) -> None:
        data = (folder / FIRST).read_bytes()
        (folder / FIRST).write_bytes(data[: max(len(data) - cut, 100)])
        message = refuses(folder)
        assert message.startswith(f"shard {FIRST} has ") and "truncated" in message and message.endswith("download it again")

    def test_shard_with_bytes_too_many(self, folder: Path) -> None:
        with (folder / FIRST).open("ab") as file:
            file.write(b"rest of another download")
        assert "bytes but its header asks for" in refuses(folder)

    @pytest.mark.parametrize(
        "content", [b"", b"1234", b"<html>404 not found</html>", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"]
    )
    def test_file_that_is_no_shard(self, folder: Path, content: bytes) -> None:
        (folder / FIRST).write_bytes(content)
        assert refuses(folder).startswith(f"shard {FIRST} has no readable header ({len(content)} bytes); the file is truncated or corrupt")

    @pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**8 + 1, 10**6, 1, 0])
    def test_impossible_header_length(self, folder: Path, length: int) -> None:
        (folder / FIRST).write_bytes(struct.pack("<Q", length) + b"{}" + b"\0" * 100)
        assert "has no readable header" in refuses(folder)

    @pytest.mark.parametrize(
        "name",
        [
            "../model.safetensors",
            "/etc/model.safetensors",
            "sub/model.safetensors",
            "..",
            "",
            "model.bin",
            "weights.safetensors.py",
            "a\0.safetensors",
            "x" * 300 + ".safetensors",
        ],
    )
    def test_name_that_is_no_plain_file_of_the_folder(self, folder: Path, name: str) -> None:
        outside = folder.parent / "model.safetensors"
        outside.write_bytes((folder / FIRST).read_bytes())
        write_index(folder, {"wide": name})
        message = refuses(folder)
        assert "is not a plain .safetensors file of this folder; it is not read" in message or "is missing although" in message

    @pytest.mark.parametrize("name", [5, None, [FIRST], {"file": FIRST}])
    def test_name_that_is_no_text(self, folder: Path, name: object) -> None:
        write_index(folder, {"wide": name})
        assert "which is not a plain .safetensors file" in refuses(folder)


class TestIndex:
    @pytest.mark.parametrize("text", ["", "{", "[1, 2", '{"weight_map": {"a": }}', "\0", "[" * 100_000])
    def test_not_json(self, folder: Path, text: str) -> None:
        (folder / INDEX_NAME).write_text(text)
        assert refuses(folder).startswith(f"{INDEX_NAME} is not valid JSON (")

    def test_not_text(self, folder: Path) -> None:
        (folder / INDEX_NAME).write_bytes(b"\xff\xfe\x00")
        assert "is not valid JSON" in refuses(folder)

    @pytest.mark.parametrize("text", ["[]", '"text"', "5", "null"])
    def test_not_an_object(self, folder: Path, text: str) -> None:
        (folder / INDEX_NAME).write_text(text)
        assert refuses(folder) == f"{INDEX_NAME} does not hold a JSON object; download the file again"

    @pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": null}'])
    def test_no_weight_map(self, folder: Path, text: str) -> None:
        (folder / INDEX_NAME).write_text(text)
        assert refuses(folder) == f"{INDEX_NAME} has no weight_map; download the file again"

    def test_key_twice(self, folder: Path) -> None:
        (folder / INDEX_NAME).write_text(f'{{"weight_map": {{"wide": "{FIRST}", "tall": "{FIRST}", "wide": "{SECOND}"}}}}')
        assert refuses(folder) == f"{INDEX_NAME} names the key wide twice; download the file again"

    def test_huge_index_is_not_read(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "MAX_INDEX_BYTES", 100)
        assert "which no checkpoint of this kind needs; this folder is not used" in refuses(folder)

    def test_key_in_another_shard_than_the_index_says(self, folder: Path) -> None:
        weight_map = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
        write_index(folder, weight_map | {"wide": SECOND})
        assert refuses(folder) == f"{INDEX_NAME} says that wide is in {SECOND}, but it is not; download the index and the shards again"

    def test_key_in_two_shards(self, folder: Path) -> None:
        values = tensors()
        save_file({key: values[key] for key in ("gated", "conv", "unused", "wide")}, folder / SECOND)
        assert refuses(folder) == f"key wide is in both {FIRST} and {SECOND}; keep the files of one download only"

    def test_stray_key(self, folder: Path) -> None:
        values = tensors()
        save_file({key: values[key] for key in ("gated", "conv", "unused")} | {"stray": torch.ones(2)}, folder / SECOND)
        assert refuses(folder) == f"shard {SECOND} holds stray, which {INDEX_NAME} does not name; download the index again"


class TestHeader:
    def refuses(self, folder: Path, header: object, body: bytes = b"\0" * 8) -> str:
        raw_shard(folder / FIRST, header, body)
        write_index(folder, {"a": FIRST})
        return refuses(folder)

    def test_key_twice(self, folder: Path) -> None:
        entry = json.dumps(describe())
        assert self.refuses(folder, f'{{"a": {entry}, "a": {entry}}}'.encode()) == f"{FIRST} names the key a twice; download the file again"

    @pytest.mark.parametrize(
        "header",
        [
            b"{not json",
            b"\xff\xff",
            b"[1, 2]",
            b"null",
            b"[" * 100_000,
            {"a": []},
            {"a": "text"},
            {"a": {}},
            {"a": describe(shape=5)},
            {"a": describe(shape=None)},
            {"a": describe(offsets=5)},
            {"a": describe(offsets=(0,))},
            {"a": describe(offsets=(0, 4, 8))},
            {"a": describe(offsets=("0", "8"))},
            b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 8]}}',
            {"a": describe(dtype=["F32"])},
        ],
    )
    def test_damaged(self, folder: Path, header: object) -> None:
        message = self.refuses(folder, header)
        assert message.startswith(f"shard {FIRST} ") and message.endswith("download it again")

    @pytest.mark.parametrize(
        "entry",
        [
            describe(shape=(3,)),
            describe(shape=(-2,)),
            describe(shape=(2.0,)),
            describe(offsets=(8, 0)),
            describe(offsets=(-8, 0)),
            describe(shape=(2**70,)),
        ],
    )
    def test_size_and_shape_that_contradict(self, folder: Path, entry: dict) -> None:
        assert "which cannot be; download it again" in self.refuses(folder, {"a": entry})

    @pytest.mark.parametrize("dtype", ["F4", "F8_E8M0", "C64", "NF4"])
    def test_unknown_dtype(self, folder: Path, dtype: str) -> None:
        assert (
            self.refuses(folder, {"a": describe(dtype)})
            == f"shard {FIRST} stores a as {dtype}; quantised checkpoints are not supported yet, use the bf16 release"
        )

    def test_metadata_is_no_tensor(self, folder: Path) -> None:
        raw_shard(folder / FIRST, {"__metadata__": {"format": "pt"}, "a": describe()}, b"\0" * 8)
        write_index(folder, {"a": FIRST})
        assert set(Checkpoint(folder).tensors) == {"a"}

    @pytest.mark.parametrize("body", [b"", b"\0" * 7, b"\0" * 9])
    def test_body_of_another_size(self, folder: Path, body: bytes) -> None:
        assert "bytes but its header asks for" in self.refuses(folder, {"a": describe()}, body)

    @pytest.mark.parametrize("second", [(0, 8), (4, 12), (16, 24)])
    def test_tensors_that_overlap_or_leave_gaps(self, folder: Path, second: tuple[int, int]) -> None:
        header = {"a": describe(), "b": describe(offsets=second)}
        assert self.refuses(folder, header, b"\0" * second[1]).startswith(f"shard {FIRST} describes tensors that overlap or leave gaps")

    def test_tensor_without_elements(self, folder: Path) -> None:
        header = {"a": describe(), "b": describe(shape=(0, 4), offsets=(0, 0)), "c": describe(shape=(0,), offsets=(8, 8))}
        raw_shard(folder / FIRST, header, b"\0" * 8)
        write_index(folder, dict.fromkeys(header, FIRST))
        assert Checkpoint(folder).bytes_on_disk() == 8
