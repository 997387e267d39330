"""Reading a folder into place, the check against the sharding table, and checksums. Damaged folders: test_checkpoint_damage.py."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small_folder import DTYPES, FIRST, SECOND, table, tensors, write_folder, write_index

from phase_parallel.parallel import checkpoint as module
from phase_parallel.parallel.checkpoint import Checkpoint, CheckpointError, allocate, first_not_finite, tensor_digests
from phase_parallel.parallel.slicing import ShardingError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path)


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
        with pytest.raises(CheckpointError, match="forgotten was filled with 0 of 3 values; a defect of the sharding table"):
            Checkpoint(folder).load(rules, allocate(rules, DTYPES, torch.device("cpu")))

    def test_linked_shards_of_a_cache_are_read(self, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        """A Hugging Face cache folder consists of links to the blobs beside its snapshots; the whole folder may be a link, too."""
        cache = tmp_path_factory.mktemp("models--org--name")
        snapshot, blobs, link = cache / "snapshots" / "0123abcd", cache / "blobs", cache / "link"
        shutil.copytree(folder, snapshot)
        blobs.mkdir()
        for name in (FIRST, SECOND):
            (snapshot / name).rename(blobs / f"blob-{name[6:11]}")
            (snapshot / name).symlink_to(Path("../../blobs") / f"blob-{name[6:11]}")
        link.symlink_to(snapshot)
        resident = allocate(table(), DTYPES, torch.device("cpu"))
        Checkpoint(link).load(table(), resident)
        assert torch.equal(resident["wide"], tensors()["wide"])

    def test_bytes_on_disk(self, folder: Path) -> None:
        assert Checkpoint(folder).bytes_on_disk() == sum(value.nbytes for value in tensors().values())


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

    @pytest.mark.parametrize(
        "dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64, torch.bool]
    )
    def test_dtype_that_is_not_supported(self, folder: Path, dtype: torch.dtype) -> None:
        checkpoint = self.rewrite(folder, lambda values: values.update(tall=torch.ones(6, 8).to(dtype)))
        with pytest.raises(
            CheckpointError, match=r"^tall is stored as .*; quantised checkpoints are not supported yet, use the bf16 release$"
        ):
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


class TestNotFinite:
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_first_name_with_such_a_value(self, value: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "DIGEST_ELEMENTS", 4)
        resident = {name: torch.ones(3, 5, dtype=dtype) for name in "cab"} | {"empty": torch.ones(0, dtype=dtype)}
        assert first_not_finite(resident) is None
        resident["c"][2, 4], resident["b"][0, 1] = value, value
        assert first_not_finite(resident) == "b"
