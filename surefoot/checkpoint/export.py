"""A checkpoint's weights as a plain Hugging Face folder of its own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from surefoot.checkpoint import storage
from surefoot.checkpoint.reader import LocalReader
from surefoot.checkpoint.sink import LocalSink
from surefoot.checkpoint.verify import open_verified
from surefoot.errors import CheckpointError, CorruptCheckpoint, NonFiniteError

EXPORT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DTYPE_KEYS = ("dtype", "torch_dtype")


def export_weights(checkpoint: Path, target: Path, dtype: str | None = None, component: str = "policy") -> Path:
    """Copy `<checkpoint>/<component>/weights`, its hashes checked, to a new folder.

    Everything is copied unchanged, unless `dtype` is given: then every float tensor gets it, integer and boolean
    tensors stay, and `config.json` says so. The folder appears under its name only when it is complete.

    Args:
        target: must not exist yet, or be empty.
        dtype: "float32", "bfloat16" or "float16".

    Raises:
        CorruptCheckpoint: the checkpoint is damaged.
        CheckpointError: there are no such weights, the target is in use, or a configuration file is not JSON.
        NonFiniteError: a value does not fit the dtype.
    """
    target = _checked(target, dtype)
    reader = open_verified(checkpoint).under(f"{component}/weights")
    if not reader.files():
        raise CheckpointError(f"{checkpoint} has no {component}/weights to export")
    _check_configs(reader)
    with _new_folder(target) as sink:
        for name in reader.files():
            _export_file(reader, sink, name, EXPORT_DTYPES[dtype] if dtype else None)
    return target


def export_merged(
    checkpoint: Path,
    target: Path,
    merge: Callable[[LocalReader], tuple[Mapping[str, bytes], Mapping[str, torch.Tensor]]],
    dtype: str | None = None,
) -> Path:
    """Write what `merge` makes of the checkpoint, its hashes checked, as a plain Hugging Face folder.

    Args:
        target, dtype: as for `export_weights`.
        merge: gives the folder's small files, and the weights by name.

    Raises:
        CheckpointError, NonFiniteError: as for `export_weights`.
    """
    target = _checked(target, dtype)
    files, tensors = merge(open_verified(checkpoint))
    wanted = EXPORT_DTYPES[dtype] if dtype else None
    with _new_folder(target) as sink:
        for name, data in files.items():
            if wanted is not None and name == "config.json":
                sink.json(name, _with_dtype(json.loads(data), str(wanted).removeprefix("torch.")))
            else:
                sink.bytes(name, data)
        cast = {name: t.to(wanted) if wanted and t.is_floating_point() else t for name, t in tensors.items()}
        sink.tensors("model.safetensors", cast, {"format": "pt"})
    return target


def _checked(target: Path, dtype: str | None) -> Path:
    if dtype is not None and dtype not in EXPORT_DTYPES:
        raise CheckpointError(f"cannot export as {dtype!r}: expected one of {', '.join(EXPORT_DTYPES)}")
    target = target.absolute()
    if os.path.lexists(target) and (target.is_symlink() or not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not an empty folder: choose a new name for the export")
    return target


@contextmanager
def _new_folder(target: Path) -> Iterator[LocalSink]:
    """The folder appears under its name when the block ends well, and not at all when it does not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.export_{os.getpid()}")
    storage.make_directory(temporary)
    try:
        sink = LocalSink(temporary)
        yield sink
        sink.sync_directories()
        os.rename(temporary, target)  # noqa: PTH104 - onto an empty folder it replaces that folder
        storage.sync_directory(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _export_file(reader: LocalReader, sink: LocalSink, name: str, dtype: torch.dtype | None) -> None:
    if dtype is not None and name.endswith(".safetensors"):
        tensors = reader.tensors(name)
        try:
            sink.tensors(name, {key: t.to(dtype) if t.is_floating_point() else t for key, t in tensors.items()})
        except NonFiniteError as error:
            kind = str(dtype).removeprefix("torch.")
            raise NonFiniteError(f"some weights are too large for {kind}: as {kind}, {error}. Take float32") from error
    elif dtype is not None and name == "config.json":
        sink.json(name, _with_dtype(reader.json(name), str(dtype).removeprefix("torch.")))
    elif dtype is not None and name.endswith(".safetensors.index.json"):
        sink.json(name, _with_total_size(reader, name, dtype))
    else:
        _copy(reader, sink, name)


def _copy(reader: LocalReader, sink: LocalSink, name: str) -> None:
    """Stream the file; its hash, taken again on the way, must be the manifest's."""
    source = reader.local(name)
    with source.open("rb") as file, sink.stream(name) as out:
        shutil.copyfileobj(file, out, 1 << 20)
    expected = reader.manifest.entry(source.relative_to(reader.root).as_posix())
    if expected is None or sink.entries[name].extents != expected.extents:
        raise CorruptCheckpoint(f"{source} changed while it was copied")


def _check_configs(reader: LocalReader) -> None:
    for name in ("config.json", "generation_config.json", "adapter_config.json"):
        if name in reader.files():
            try:
                sound = isinstance(reader.json(name), dict)
            except ValueError as error:
                raise CheckpointError(f"{reader.root}: {name} is not JSON ({error}); it cannot be exported") from error
            if not sound:
                raise CheckpointError(f"{reader.root}: {name} is not a JSON object; it cannot be exported")


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The configuration, and those of sub-models inside it, with the dtype that the weights now have."""

    def changed(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        return {k: dtype if k in _DTYPE_KEYS and isinstance(v, str) else changed(v) for k, v in part.items()}

    return {**changed(config), "dtype": dtype}


def _with_total_size(reader: LocalReader, name: str, dtype: torch.dtype) -> dict[str, Any]:
    index: dict[str, Any] = reader.json(name)
    total = 0
    for shard in sorted(set(index["weight_map"].values())):
        for tensor in reader.tensors(shard).values():
            total += tensor.numel() * (dtype.itemsize if tensor.is_floating_point() else tensor.element_size())
    return {**index, "metadata": {**index.get("metadata", {}), "total_size": total}}
