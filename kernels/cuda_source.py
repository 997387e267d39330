"""CUDA C++ of this pack, compiled by NVRTC for the device when it is first needed: for what Triton cannot say.

NVRTC and its Python bindings (``cuda.bindings``) come with PyTorch's packages for CUDA; a source of a few hundred lines takes half a second.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch

try:
    from cuda.bindings import driver, nvrtc
except ImportError:  # PyTorch for the CPU, or older than its use of the bindings
    driver = nvrtc = None

FOLDER = Path(__file__).parent
_BFLOAT16, _SWIZZLE_128B, _PROMOTE_256B = 9, 3, 3


class CudaSourceError(RuntimeError):
    """A source does not compile or load here; the sentence says why."""


class TensorMap(ctypes.Structure):
    """What the copy engine knows of a matrix: 128 bytes that a kernel takes by value."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


class CudaKernel:
    """One compiled function with the dynamic shared memory that it needs, in bytes."""

    def __init__(self, function: object, shared: int):
        self._function, self._shared = function, shared

    def launch(self, blocks: int, threads: int, arguments: Sequence[ctypes.Structure | ctypes._SimpleCData]) -> None:
        """On PyTorch's current stream. Raises CudaSourceError."""
        places = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        stream = torch.cuda.current_stream().cuda_stream
        _check(driver.cuLaunchKernel(self._function, blocks, 1, 1, threads, 1, 1, self._shared, stream, ctypes.addressof(places), 0), "start a kernel")


def why_not_compiled() -> str | None:
    """None when sources can be compiled, else the reason for a message."""
    return "cuda.bindings is not installed" if driver is None else None


@functools.cache
def compile_kernel(file: str, name: str, definitions: tuple[str, ...], architecture: str, shared: int, device: int) -> CudaKernel:
    """Function ``name`` of ``file`` in this folder, for CUDA device number ``device``. ``definitions``: like ``"GATED=1"``.

    Raises:
        CudaSourceError: it cannot be compiled or loaded.
    """
    reason = why_not_compiled()
    if reason is not None:
        raise CudaSourceError(f"{file} cannot be compiled: {reason}")
    try:
        binary = _compile(FOLDER / file, definitions, architecture)
    except CudaSourceError:
        raise
    except RuntimeError as error:  # the bindings look for NVRTC at the first call, and another PyTorch may have brought another version of it
        raise CudaSourceError(f"{file} cannot be compiled: {error}") from error
    with torch.cuda.device(device):
        # The runtime makes its context, and makes it this thread's, with the first call that needs one; the driver's functions below do not.
        torch.cuda.synchronize()
        library = _check(driver.cuModuleLoadData(binary), f"load {file}")
        function = _check(driver.cuModuleGetFunction(library, name.encode()), f"find {name} in {file}")
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(function, attribute, shared), f"reserve {shared} bytes of shared memory for {name}")
    return CudaKernel(function, shared)


def _compile(path: Path, definitions: tuple[str, ...], architecture: str) -> bytes:
    program = _check(nvrtc.nvrtcCreateProgram(path.read_bytes(), path.name.encode(), 0, [], []), f"read {path.name}")
    options = [f"--gpu-architecture={architecture}", "--std=c++17", *(f"-D{definition}" for definition in definitions)]
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if int(result):
            log = bytearray(_check(nvrtc.nvrtcGetProgramLogSize(program), "read the log"))
            _check(nvrtc.nvrtcGetProgramLog(program, log), "read the log")
            raise CudaSourceError(f"{path.name} does not compile for {architecture}: {log.rstrip(bytes(1)).decode(errors='replace').strip()}")
        binary = bytearray(_check(nvrtc.nvrtcGetCUBINSize(program), "read the binary"))
        _check(nvrtc.nvrtcGetCUBIN(program, binary), "read the binary")
        return bytes(binary)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@functools.lru_cache(maxsize=4096)
def tensor_map(address: int, rows: int, columns: int, row_stride: int, box_rows: int, box_columns: int) -> TensorMap:
    """A bf16 matrix ``[rows, columns]`` at ``address`` whose rows lie ``row_stride`` elements apart, copied in boxes that lie in shared memory in the
    128-byte swizzle. It says where memory is and keeps nothing alive. Raises CudaSourceError."""
    # The driver wants 64-byte alignment, which ctypes does not promise.
    room = (ctypes.c_char * (ctypes.sizeof(TensorMap) + 64))()
    aligned = -(-ctypes.addressof(room) // 64) * 64
    result = _driver_library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned), _BFLOAT16, 2, ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(row_stride * 2), (ctypes.c_uint32 * 2)(box_columns, box_rows),
        (ctypes.c_uint32 * 2)(1, 1), 0, _SWIZZLE_128B, _PROMOTE_256B, 0,
    )  # fmt: skip
    if result:
        raise CudaSourceError(f"the driver refused a matrix of {rows} x {columns} with row stride {row_stride} as a tensor map (error {result})")
    return TensorMap.from_buffer_copy(ctypes.string_at(aligned, ctypes.sizeof(TensorMap)))


@functools.cache
def _driver_library() -> ctypes.CDLL:
    """The bindings' own function gives the driver a structure that may be aligned too little."""
    return ctypes.CDLL("libcuda.so.1")


def _check(result: tuple, what: str) -> object:
    """The value behind the error code of a call of the bindings."""
    code, *values = result
    if int(code):
        raise CudaSourceError(f"CUDA could not {what}: {code.name}")
    return values[0] if values else None
