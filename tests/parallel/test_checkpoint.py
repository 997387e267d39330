"""Folders as people have them: complete, truncated, mixed up, hostile. Every refusal is a sentence and comes before memory is spent."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from phase_parallel.parallel import checkpoint as module
from phase_parallel.parallel.checkpoint import INDEX_NAME, Checkpoint, CheckpointError, allocate, tensor_digests
from phase_parallel.parallel.plan import make_plan
from phase_parallel.parallel.slicing import ShardingError, ShardingTable

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
DTYPES = {"trunk": torch.float32}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"wide": (8, 6), "tall": (6, 8), "gated": (16, 4), "norm": (5,), "conv": (2, 3, 3, 3), "unused": (7,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def table(**plan: object) -> ShardingTable:
    made = ShardingTable(make_plan(**(plan or dict(name="single", world_size=1))))
    made.column_parallel("wide", (8, 6), "trunk", target="wide")
    made.row_parallel("tall", (6, 8), "trunk", target="tall")
    made.gated_column_parallel("gated", (16, 4), "trunk", target="gated")
    made.replicated("norm", (5,), "trunk")
    made.replicated("conv", (2, 3, 3, 3), "trunk")
    made.unused("unused", (7,))
    return made


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    values = tensors()
    parts = {FIRST: ["wide", "tall", "norm"], SECOND: ["gated", "conv", "unused"]}
    for name, keys in parts.items():
        save_file({key: values[key] for key in keys}, tmp_path / name, metadata={"format": "pt"})
    write_index(tmp_path, {key: name for name, keys in parts.items() for key in keys})
    return tmp_path


def raw_shard(path: Path, header: object, body: bytes = b"") -> None:
    """A shard with any header at all."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def describe(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


class TestLoading:
    @pytest.mark.parametrize("plan", [dict(name="single", world_size=1), dict(name="tp", world_size=4), dict(name="hybrid", world_size=4)])
    def test_slices_land_in_place(self, folder: Path, plan: dict) -> None:
        values, checkpoint = tensors(), Checkpoint(folder)
        for rank in range(plan["world_size"]):
            rules = table(**plan, rank=rank)
            resident = allocate(rules, DTYPES, torch.device("cpu"))
            addresses = {name: tensor.data_ptr() for name, tensor in resident.items()}
            checkpoint.load(rules, resident)
            own = rules.plan
            assert torch.equal(resident["wide"], values["wide"].chunk(own.storage_tp)[own.shard])
            assert torch.equal(resident["tall"], values["tall"].chunk(own.storage_tp, dim=1)[own.shard])
            assert torch.equal(resident["conv"], values["conv"])
            for micro, block in enumerate(resident["gated"].chunk(own.micro_count)):
                unit = own.shard * own.micro_count + micro
                halves = [half.chunk(own.world_size)[unit] for half in values["gated"].chunk(2)]
                assert torch.equal(block, torch.cat(halves))
            assert {name: tensor.data_ptr() for name, tensor in resident.items()} == addresses

    def test_small_chunks_and_reopened_files_give_the_same(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = allocate(table(), DTYPES, torch.device("cpu"))
        Checkpoint(folder).load(table(), whole)
        opened = []
        real = module.safe_open
        monkeypatch.setattr(module, "safe_open", lambda *args, **more: opened.append(args) or real(*args, **more))
        monkeypatch.setattr(module, "WINDOW_BYTES", 64)
        monkeypatch.setattr(module, "CHUNK_BYTES", 40)
        parts = allocate(table(), DTYPES, torch.device("cpu"))
        Checkpoint(folder).load(table(), parts)
        assert len(opened) > 4
        for name in whole:
            assert torch.equal(whole[name], parts[name])

    def test_values_are_cast_to_the_resident_dtype(self, tmp_path: Path) -> None:
        values = tensors()
        stored = {key: value.to(torch.bfloat16) for key, value in values.items()} | {"norm": values["norm"].half()}
        save_file(stored, tmp_path / FIRST)
        write_index(tmp_path, dict.fromkeys(stored, FIRST))
        resident = allocate(table(), DTYPES, torch.device("cpu"))
        Checkpoint(tmp_path).load(table(), resident)
        assert torch.equal(resident["wide"], values["wide"].bfloat16().float())
        assert torch.equal(resident["norm"], values["norm"].half().float())

    def test_progress_counts_to_the_end(self, folder: Path) -> None:
        seen: list[tuple[int, int]] = []
        rules = table(name="hybrid", world_size=4, rank=3)
        resident = allocate(rules, DTYPES, torch.device("cpu"))
        Checkpoint(folder).load(rules, resident, progress=lambda done, total: seen.append((done, total)))
        done = [value for value, _ in seen]
        assert done == sorted(done) and {total for _, total in seen} == {done[-1]}
        assert done[-1] == sum(tensor.numel() for tensor in resident.values())

    def test_element_that_no_rule_fills_is_found(self, folder: Path) -> None:
        rules = table()
        rules.target("forgotten", (3,), "trunk", "replicated")
        with pytest.raises(CheckpointError, match="forgotten was filled with 0 of 3 values; this is a defect of the sharding table"):
            Checkpoint(folder).load(rules, allocate(rules, DTYPES, torch.device("cpu")))

    def test_linked_shards_are_read(self, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        """A Hugging Face cache folder consists of links to blobs elsewhere."""
        blobs = tmp_path_factory.mktemp("blobs")
        for name in (FIRST, SECOND):
            (folder / name).rename(blobs / f"blob-{name[6:11]}")
            (folder / name).symlink_to(blobs / f"blob-{name[6:11]}")
        resident = allocate(table(), DTYPES, torch.device("cpu"))
        Checkpoint(folder).load(table(), resident)
        assert torch.equal(resident["wide"], tensors()["wide"])

    def test_bytes_on_disk(self, folder: Path) -> None:
        assert Checkpoint(folder).bytes_on_disk() == sum(value.nbytes for value in tensors().values())


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

    @pytest.mark.parametrize("content", [b"", b"1234", b"<html>404 not found</html>", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"])
    def test_file_that_is_no_shard(self, folder: Path, content: bytes) -> None:
        (folder / FIRST).write_bytes(content)
        assert refuses(folder).startswith(f"shard {FIRST} has no readable header ({len(content)} bytes); the file is truncated or corrupt")

    @pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**8 + 1, 10**6, 1, 0])
    def test_impossible_header_length(self, folder: Path, length: int) -> None:
        (folder / FIRST).write_bytes(struct.pack("<Q", length) + b"{}" + b"\0" * 100)
        assert "has no readable header" in refuses(folder)

    @pytest.mark.parametrize(
        "name", ["../model.safetensors", "/etc/model.safetensors", "sub/model.safetensors", "..", "", "model.bin", "weights.safetensors.py", "a\0.safetensors", "x" * 300 + ".safetensors"]
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
        [describe(shape=(3,)), describe(shape=(-2,)), describe(shape=(2.0,)), describe(offsets=(8, 0)), describe(offsets=(-8, 0)), describe(shape=(2**70,))],
    )
    def test_size_and_shape_that_contradict(self, folder: Path, entry: dict) -> None:
        assert "which cannot be; download it again" in self.refuses(folder, {"a": entry})

    @pytest.mark.parametrize("dtype", ["F4", "F8_E8M0", "C64", "NF4"])
    def test_unknown_dtype(self, folder: Path, dtype: str) -> None:
        assert self.refuses(folder, {"a": describe(dtype)}) == f"shard {FIRST} stores a as {dtype}; quantised checkpoints are not supported yet, use the bf16 release"

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


class TestAgainstTheTable:
    def rewrite(self, folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Checkpoint:
        values = tensors()
        change(values)
        (folder / SECOND).unlink()
        save_file(values, folder / FIRST)
        write_index(folder, dict.fromkeys(values, FIRST))
        return Checkpoint(folder)

    def test_unknown_key(self, folder: Path) -> None:
        checkpoint = self.rewrite(folder, lambda values: values.update(adapter=torch.ones(2)))
        with pytest.raises(ShardingError, match="has 1 keys that this model does not know, first adapter"):
            checkpoint.check(table())

    def test_missing_key(self, folder: Path) -> None:
        checkpoint = self.rewrite(folder, lambda values: values.pop("norm"))
        with pytest.raises(ShardingError, match="lacks 1 keys that this model needs, first norm"):
            checkpoint.check(table())

    def test_wrong_shape(self, folder: Path) -> None:
        checkpoint = self.rewrite(folder, lambda values: values.update(tall=torch.ones(6, 4)))
        with pytest.raises(ShardingError, match=r"tall has shape \[6, 4\] but config.json asks for \[6, 8\]"):
            checkpoint.check(table())

    @pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64, torch.bool])
    def test_dtype_that_is_not_supported(self, folder: Path, dtype: torch.dtype) -> None:
        checkpoint = self.rewrite(folder, lambda values: values.update(tall=torch.ones(6, 8).to(dtype)))
        with pytest.raises(CheckpointError, match="^tall is stored as .*; quantised checkpoints are not supported yet, use the bf16 release$"):
            checkpoint.check(table())

    def test_scales_of_a_quantised_file_are_not_called_unknown(self, folder: Path) -> None:
        def quantise(values: dict[str, torch.Tensor]) -> None:
            values["tall"] = values["tall"].to(torch.float8_e4m3fn)
            values["tall.weight_scale"] = torch.ones(1)

        with pytest.raises(CheckpointError, match="quantised checkpoints are not supported yet"):
            self.rewrite(folder, quantise).check(table())

    def test_nothing_is_written_before_the_check(self, folder: Path) -> None:
        checkpoint = self.rewrite(folder, lambda values: values.pop("norm"))
        resident = {name: torch.full(t.shape, 7.0) for name, t in table().targets.items()}
        with pytest.raises(ShardingError):
            checkpoint.load(table(), resident)
        assert all(bool((tensor == 7.0).all()) for tensor in resident.values())

    def test_shard_that_shrinks_between_check_and_load(self, folder: Path) -> None:
        checkpoint = Checkpoint(folder)
        (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:-8])
        with pytest.raises(CheckpointError, match=f"shard {SECOND} cannot be read"):
            checkpoint.load(table(), allocate(table(), DTYPES, torch.device("cpu")))


class TestDigests:
    def test_one_bit_or_two_swapped_values_change_it(self) -> None:
        base = torch.arange(1.0, 7.0)
        other, swapped = base.clone(), base[[1, 0, 2, 3, 4, 5]]
        other.view(torch.int32)[3] ^= 1
        digests = [dict(tensor_digests({"a": value}))["a"] for value in (base, other, swapped, base.clone())]
        assert digests[0] == digests[3]
        assert len(set(digests)) == 3

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_layout_does_not_matter(self, dtype: torch.dtype) -> None:
        value = torch.randn(4, 6).to(dtype)
        strided = torch.empty(6, 4, dtype=dtype).T.copy_(value)
        assert list(tensor_digests({"a": value})) == list(tensor_digests({"a": strided}))

    def test_parts_give_names_in_order_and_64_bits(self) -> None:
        digests = list(tensor_digests({"b": torch.full((5,), -1.0), "a": torch.zeros(0)}))
        assert [name for name, _ in digests] == ["a", "b"]
        assert all(0 <= value < 2**64 for _, value in digests)
