"""Every file-system operation that a save, a commit or a deletion makes, one thin function each.

They are gathered here so that a test can stop the process before each single one: every function first tells
`observers` what it is about to do. Nothing here retries, and nothing here follows a link where it could be led away.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

# Called with the operation's name and its path, before the operation. Empty outside tests.
observers: list[Callable[[str, str], None]] = []

_libc = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_NOT_SUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}


def _tell(operation: str, path: str | os.PathLike[str]) -> None:
    for observer in observers:
        observer(operation, os.fspath(path))


def make_directory(path: Path) -> None:
    _tell("mkdir", path)
    os.mkdir(path)  # noqa: PTH102 - one system call each, here and below


def create_file(path: Path) -> int:
    """A descriptor for a new file; one that exists, or a link in its place, is an error."""
    _tell("open", path)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)


def open_for_reading(path: Path) -> int:
    """A descriptor for a regular file; a link or anything else is an `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def write(descriptor: int, data: memoryview, path: Path) -> int:
    """Bytes taken, which may be fewer than given."""
    _tell("write", path)
    return os.write(descriptor, data)


def fsync(descriptor: int, path: Path) -> None:
    _tell("fsync", path)
    os.fsync(descriptor)


def close(descriptor: int, path: Path) -> None:
    _tell("close", path)
    os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power cut."""
    _tell("fsync", path)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Rename; where the system can tell, a target that exists is an error and never replaced."""
    _tell("rename", target)
    if not _renameat2(source, target, _RENAME_NOREPLACE):
        os.rename(source, target)  # noqa: PTH104


def replace_file(source: Path, target: Path) -> None:
    """Atomically put a finished file in the place of another."""
    _tell("rename", target)
    os.replace(source, target)  # noqa: PTH105


def exchange(a: Path, b: Path) -> bool:
    """Swap two names in one atomic step. `False`, and nothing done, where the file system cannot."""
    _tell("exchange", b)
    return _renameat2(a, b, _RENAME_EXCHANGE)


def _renameat2(a: Path, b: Path, flags: int) -> bool:
    function = getattr(_libc, "renameat2", None)
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), ctypes.c_uint(flags)) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_SUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(a), None, str(b))


def unlink(path: Path) -> None:
    _tell("unlink", path)
    os.unlink(path)  # noqa: PTH108


def remove_directory(path: Path) -> None:
    _tell("rmdir", path)
    os.rmdir(path)  # noqa: PTH106


def write_small_file(path: Path, data: bytes) -> None:
    """Replace a small file atomically: temporary name, fsync, rename, fsync of the directory."""
    temporary = path.with_name(f".{path.name}.tmp")
    if os.path.lexists(temporary):
        unlink(temporary)
    write_new_file(temporary, data)
    replace_file(temporary, path)
    sync_directory(path.parent)


def write_new_file(path: Path, data: bytes) -> None:
    descriptor = create_file(path)
    try:
        write_all(descriptor, memoryview(data), path)
        fsync(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    close(descriptor, path)


def write_all(descriptor: int, data: memoryview, path: Path) -> None:
    """Write all of it, however many short writes that takes.

    Raises:
        OSError: nothing was taken, or the system refused.
    """
    while data:
        taken = write(descriptor, data, path)
        if taken <= 0:
            raise OSError(errno.EIO, "the system took no bytes", str(path))
        data = data[taken:]


def remove_tree(path: Path) -> None:
    """Delete a directory, or whatever else has that name, without following a link. The manifest goes first, so that
    what a crash leaves behind can never be taken for a checkpoint."""
    if path.is_symlink() or not path.is_dir():
        unlink(path)
        return
    for entry in sorted(path.iterdir(), key=lambda entry: (entry.name != "manifest.json", entry.name)):
        remove_tree(entry)
    remove_directory(path)
