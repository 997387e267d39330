"""Read a sharded safetensors folder straight into resident tensors.

Every slice this rank needs is read with ``get_slice`` and copied to its final place; nothing else of a file is read. Peak host memory: the resident
tensors (when they live on the host) plus at most ``WINDOW_BYTES`` of mapped file and one slice. Peak device memory: the resident tensors plus one
slice. All headers are checked before the first byte of memory is spent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .folder_files import why_not_read
from .slicing import Piece, ShardingTable, piece_elements

INDEX_NAME = "model.safetensors.index.json"
MAX_INDEX_BYTES = 256 << 20
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format itself
# A mapped file counts as resident memory until it is closed, so files are re-opened after this many bytes.
WINDOW_BYTES = 96 << 20
# Elements per part of a checksum or a search for NaN: its temporaries, 8 bytes an element, hardly count beside the weights, and on a CPU
# parts four times as large took 1.6 times as long.
DIGEST_ELEMENTS = 1 << 20
# A slice is copied in parts of this size, so that a 1 GB embedding does not need 1 GB beside its final place.
CHUNK_BYTES = 32 << 20
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
FLOAT_DTYPES = ("F32", "F16", "BF16")
_QUANTISED = "quantised checkpoints are not supported yet, use the bf16 release"


class CheckpointError(ValueError):
    """A folder that cannot be loaded; the message names the file and what to do."""


@dataclass(frozen=True)
class TensorInfo:
    """Where a key lives."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def _unique_pairs(path: Path) -> Callable[[list[tuple[str, object]]], dict]:
    def hook(pairs: list[tuple[str, object]]) -> dict:
        seen: dict[str, object] = {}
        for key, value in pairs:
            if key in seen:
                raise CheckpointError(f"{path.name} names the key {key} twice; download the file again")
            seen[key] = value
        return seen

    return hook


def _read_json(path: Path, limit: int) -> dict:
    reason = why_not_read(path, limit)
    if reason:
        raise CheckpointError(f"{path.name} {reason}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique_pairs(path))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is not valid JSON ({error}); download the file again") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path.name} does not hold a JSON object; download the file again")
    return data


class Checkpoint:
    """An official folder as downloaded: ``model.safetensors.index.json`` and its shards. Opening it reads headers only.

    Raises:
        CheckpointError: no index, an index that names an absent or truncated file, a file outside the folder, a key in two places or none.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        index = self.folder / INDEX_NAME
        if not self.folder.is_dir():
            raise CheckpointError(f"model folder {self.folder} does not exist; give the folder that holds config.json and {INDEX_NAME}")
        if not index.is_file():
            raise CheckpointError(f"{self.folder} has no {INDEX_NAME}; give the official folder as downloaded, not a single file")
        weight_map = _read_json(index, MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{INDEX_NAME} has no weight_map; download the file again")
        headers = {name: self._header(name) for name in sorted(set(map(str, weight_map.values())))}
        self.tensors = self._join(weight_map, headers)

    def _path(self, name: str) -> Path:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{INDEX_NAME} names the file {name!r}, which is not a plain .safetensors file of this folder; it is not read")
        path = self.folder / name
        with suppress(OSError):  # a name too long for the disk
            if path.is_file():
                reason = why_not_read(path)
                if reason:
                    raise CheckpointError(f"shard {name} {reason}")
                return path
        raise CheckpointError(f"shard {name} is missing although {INDEX_NAME} names it; download it again into {self.folder}")

    def _header(self, name: str) -> dict[str, TensorInfo]:
        path = self._path(name)
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little") if len(prefix) == 8 else -1
            if not 2 <= length <= MAX_HEADER_BYTES or 8 + length > size:
                raise CheckpointError(f"shard {name} has no readable header ({size} bytes); the file is truncated or corrupt, download it again")
            try:
                header = json.loads(file.read(length), object_pairs_hook=_unique_pairs(path))
                header.pop("__metadata__", None)
                infos = {key: _tensor_info(name, key, value) for key, value in header.items()}
                spans = sorted(tuple(value["data_offsets"]) for value in header.values())
            except CheckpointError:
                raise
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise CheckpointError(f"shard {name} has a damaged header ({error}); download it again") from error
        if [start for start, _ in spans] != [0, *(end for _, end in spans)][: len(spans)]:
            raise CheckpointError(f"shard {name} describes tensors that overlap or leave gaps; the file is corrupt, download it again")
        end = spans[-1][1] if spans else 0
        if 8 + length + end != size:
            raise CheckpointError(f"shard {name} has {size} bytes but its header asks for {8 + length + end}; the file is truncated, download it again")
        return infos

    def _join(self, weight_map: dict[str, str], headers: dict[str, dict[str, TensorInfo]]) -> dict[str, TensorInfo]:
        owners: dict[str, str] = {}
        for name, infos in headers.items():
            for key in infos:
                if key in owners:
                    raise CheckpointError(f"key {key} is in both {owners[key]} and {name}; keep the files of one download only")
                owners[key] = name
        tensors = {}
        for key, name in weight_map.items():
            if key not in headers[name]:
                raise CheckpointError(f"{INDEX_NAME} says that {key} is in {name}, but it is not; download the index and the shards again")
            tensors[key] = headers[name][key]
        stray = sorted(owners.keys() - tensors.keys())
        if stray:
            raise CheckpointError(f"shard {owners[stray[0]]} holds {stray[0]}, which {INDEX_NAME} does not name; download the index again")
        return tensors

    def check(self, table: ShardingTable) -> None:
        """Keys, shapes and dtypes against ``table``, before memory is spent."""
        for key, info in self.tensors.items():
            unread = key in table.entries and not table.entries[key].pieces
            if info.dtype not in FLOAT_DTYPES and not unread:
                raise CheckpointError(f"{key} is stored as {info.dtype}; {_QUANTISED}")
        table.check_keys(self.tensors)
        for key, info in self.tensors.items():
            table.check_shape(key, info.shape)

    def bytes_on_disk(self) -> int:
        return sum(prod(info.shape) * DTYPE_BYTES[info.dtype] for info in self.tensors.values())

    def load(
        self, table: ShardingTable, resident: Mapping[str, torch.Tensor], *, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        """Fill every element of ``resident`` (one tensor per target of ``table``); ``progress(bytes done, bytes in all)``.

        Raises:
            ShardingError, CheckpointError: nothing was loaded, or the load is incomplete and the tensors must be dropped.
        """
        self.check(table)
        filled = dict.fromkeys(resident, 0)
        work = [(key, piece) for key in sorted(self.tensors, key=lambda k: (self.tensors[k].file, k)) for piece in table.entries[key].pieces]
        total = sum(piece_elements(piece) for _, piece in work) or 1
        done = 0
        reader = SliceReader(self)
        for key, piece in work:
            reader.copy(key, piece, resident[piece.target])
            filled[piece.target] += piece_elements(piece)
            done += piece_elements(piece)
            progress(done, total)
        reader.close()
        holes = [name for name, count in filled.items() if count != resident[name].numel()]
        if holes:
            raise CheckpointError(f"{holes[0]} was filled with {filled[holes[0]]} of {resident[holes[0]].numel()} values; a defect of the sharding table")


def _tensor_info(file: str, key: str, value: dict) -> TensorInfo:
    dtype, shape, (start, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    if dtype not in DTYPE_BYTES:
        raise CheckpointError(f"shard {file} stores {key} as {dtype}; {_QUANTISED}")
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, start, end)) or end - start != prod(shape) * DTYPE_BYTES[dtype]:
        raise CheckpointError(f"shard {file} describes {key} as {dtype} {list(shape)} in {end - start} bytes, which cannot be; download it again")
    return TensorInfo(file, dtype, shape)


class SliceReader:
    """Copies slices, holding one file open and re-opening it when ``WINDOW_BYTES`` of it have been mapped in."""

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint = checkpoint
        self._name = ""
        self._handle: object | None = None
        self._mapped = 0

    def copy(self, key: str, piece: Piece, destination: torch.Tensor) -> None:
        info = self._checkpoint.tensors[key]
        place = destination[piece.index]
        row_bytes = max(1, piece_elements(piece) * DTYPE_BYTES[info.dtype] // max(1, piece.source[0].stop - piece.source[0].start))
        step = max(1, CHUNK_BYTES // row_bytes)
        first = piece.source[0]
        for start in range(first.start, first.stop, step):
            stop = min(start + step, first.stop)
            part = self._slice(info, key, (slice(start, stop), *piece.source[1:]))
            place[start - first.start : stop - first.start].copy_(part)

    def _slice(self, info: TensorInfo, key: str, source: tuple[slice, ...]) -> torch.Tensor:
        if info.file != self._name or self._mapped > WINDOW_BYTES:
            self.close()
            try:
                self._handle = safe_open(self._checkpoint.folder / info.file, framework="pt", device="cpu").__enter__()
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"shard {info.file} cannot be read ({error}); download it again") from error
            self._name = info.file
        part = self._handle.get_slice(key)[source]
        # Column slices touch every row's pages, so count whole rows.
        rows = source[0].stop - source[0].start
        self._mapped += rows * prod(info.shape[1:]) * DTYPE_BYTES[info.dtype]
        return part

    def close(self) -> None:
        if self._handle is not None:
            self._handle.__exit__(None, None, None)
        self._handle, self._name, self._mapped = None, "", 0


def allocate(table: ShardingTable, dtypes: Mapping[str, torch.dtype], device: torch.device) -> dict[str, torch.Tensor]:
    """The resident tensors, each allocated once and never again."""
    return {name: torch.empty(t.shape, dtype=dtypes[t.kind], device=device) for name, t in table.targets.items()}


def first_not_finite(resident: Mapping[str, torch.Tensor]) -> str | None:
    """Name of the first tensor that holds NaN or infinity. In parts: summing bf16 in fp32 on a CPU makes an fp32 copy of what it sums."""
    for name in sorted(resident):
        # One running sum: a list of small results between the copies would keep the heap from using their space again.
        total = torch.zeros((), dtype=torch.float32, device=resident[name].device)
        for part in resident[name].detach().reshape(-1).split(DIGEST_ELEMENTS):
            total += part.sum(dtype=torch.float32)
        if not bool(torch.isfinite(total)):
            return name
    return None


def tensor_digests(resident: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, int]]:
    """``(name, checksum)`` per tensor, in name order; replicas of a shard must agree on all of them.

    Computed where the tensor lives (82 GB need not cross a bus): the bytes as integers, each weighted with its place, modulo 2^64.
    """
    places: dict[torch.device, torch.Tensor] = {}
    for name in sorted(resident):
        flat = resident[name].detach().reshape(-1)
        if flat.device not in places:
            places[flat.device] = torch.arange(1, DIGEST_ELEMENTS + 1, device=flat.device, dtype=torch.int64)
        bits = flat.view(torch.int16 if flat.element_size() == 2 else torch.int32)
        # Stays on the device until the end; int64 arithmetic wraps.
        total = torch.zeros((), device=flat.device, dtype=torch.int64)
        for part in bits.split(DIGEST_ELEMENTS):
            total = total * 1_000_003 + (part * places[flat.device][: part.numel()]).sum()
        yield name, int(total) & 0xFFFF_FFFF_FFFF_FFFF
