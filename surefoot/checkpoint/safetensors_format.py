"""The safetensors file format: a length (8 bytes, little endian), a JSON header, the tensors' bytes without gaps.

Written by hand, because the library builds a whole file in memory or writes it without fsync, and the bytes are to be
hashed as they pass.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from surefoot.errors import CheckpointError, NonFiniteError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# As unsigned integers without their sign bit, all finite values lie below the pattern given here.
_NON_FINITE_FROM: dict[torch.dtype, tuple[type, int, int]] = {
    torch.float64: (np.uint64, 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    torch.float32: (np.uint32, 0x7FFF_FFFF, 0x7F80_0000),
    torch.complex64: (np.uint32, 0x7FFF_FFFF, 0x7F80_0000),
    torch.bfloat16: (np.uint16, 0x7FFF, 0x7F80),
    torch.float16: (np.uint16, 0x7FFF, 0x7C00),
    torch.float8_e5m2: (np.uint8, 0x7F, 0x7C),
    torch.float8_e4m3fn: (np.uint8, 0x7F, 0x7F),
}
_MAX_HEADER_BYTES = 100 << 20


class TensorSpan(NamedTuple):
    """Where a tensor lies in a file; `start` and `end` count from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def layout(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names in file order: widest elements first, so that every tensor is aligned, then by name."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def encode_header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Raises `CheckpointError` for a tensor whose dtype the format does not know."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name in layout(tensors):
        tensor = tensors[name]
        if tensor.dtype not in _NAMES or tensor.layout != torch.strided:
            raise CheckpointError(f"tensor {name!r} ({tensor.dtype}, {tensor.layout}) does not fit a safetensors file")
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def decode_header(data: memoryview, file_size: int) -> tuple[dict[str, TensorSpan], int]:
    """The tensors' places and where their data starts. `data`: the file's first bytes, the whole header at least.

    Raises:
        ValueError: the header is malformed, or does not describe exactly the bytes that follow it.
    """
    length = int.from_bytes(data[:8], "little")
    if file_size < 8 or length > min(_MAX_HEADER_BYTES, file_size - 8):
        raise ValueError(f"a safetensors header of {length} bytes does not fit a file of {file_size}")
    header = json.loads(bytes(data[8 : 8 + length]))
    if not isinstance(header, dict):
        raise ValueError("the safetensors header is no JSON object")
    header.pop("__metadata__", None)
    spans = {name: _decode_span(name, value) for name, value in header.items()}
    end = 0
    for name, span in sorted(spans.items(), key=lambda item: (item[1].start, item[1].end)):
        if span.start != end:
            raise ValueError(f"the safetensors header leaves a gap or an overlap before {name!r}")
        end = span.end
    if 8 + length + end != file_size:
        raise ValueError(f"the safetensors header describes {8 + length + end} bytes, the file has {file_size}")
    return spans, 8 + length


def _decode_span(name: str, value: Any) -> TensorSpan:
    try:
        dtype, shape, (start, end) = DTYPES[value["dtype"]], tuple(value["shape"]), value["data_offsets"]
        sound = all(isinstance(number, int) and number >= 0 for number in (*shape, start, end))
        elements = int(np.prod([1, *shape], dtype=object)) if sound else -1
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"the safetensors header is malformed at {name!r}") from None
    if not sound or end - start != elements * dtype.itemsize:
        raise ValueError(f"the safetensors header gives {name!r} a shape that does not fit its bytes")
    return TensorSpan(dtype, shape, start, end)


def tensor_bytes(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The tensor's bytes as a flat array; a view where it is contiguous and on the CPU, else a copy."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    array: np.ndarray[Any, np.dtype[np.uint8]] = (
        flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    )
    return array


def refuse_non_finite(chunk: np.ndarray[Any, np.dtype[np.uint8]], offset: int, name: str, tensor: Tensor) -> None:
    """Check one chunk of a tensor's bytes, which starts `offset` bytes into it. Bit patterns are compared by numpy:
    torch would start its own team of threads beside the training's.

    Raises:
        NonFiniteError: a value is NaN or infinite; names the tensor and the first index.
    """
    if tensor.dtype not in _NON_FINITE_FROM or not chunk.size:
        return
    kind, magnitude, first_bad = _NON_FINITE_FROM[tensor.dtype]
    patterns = chunk.view(kind) & kind(magnitude)
    if patterns.max() >= first_bad:
        at = int((patterns >= first_bad).argmax()) + offset // patterns.itemsize
        at = at // 2 if tensor.is_complex() else at
        index = [int(i) for i in np.unravel_index(at, tuple(tensor.shape))] if tensor.dim() else []
        value = tensor[tuple(index)].item()
        raise NonFiniteError(f"tensor {name!r} holds {value} at index {index}; a state like that is never saved")
