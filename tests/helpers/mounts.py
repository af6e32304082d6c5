"""Real file systems that are small, full, read-only or cut off, mounted for one test and always unmounted."""

from __future__ import annotations

import errno
import fcntl
import functools
import itertools
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MIB = 1 << 20
_FS_IOC_SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32)
_NO_LOG_FLUSH = 2  # as a power cut: what the journal has not got is gone


@functools.cache
def why_not() -> str:
    """Why mounting is not possible here; empty where it is. Tried once, with each kind that the tests need."""
    for tool in ("mount", "umount", "mkfs.ext4", "losetup", "chattr"):
        if shutil.which(tool, path=_PATH) is None:
            return f"there is no {tool}"
    with tempfile.TemporaryDirectory(prefix="surefoot-probe-") as folder:
        try:
            with tmpfs(Path(folder) / "memory", 16 * MIB) as memory, ext4(memory / "image", Path(folder) / "disk"):
                pass
        except (OSError, subprocess.CalledProcessError) as error:
            said = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
            return f"mounting is not permitted: {said}"
    return ""


@pytest.fixture
def can_mount() -> None:
    """Skips, with the reason, where file systems cannot be mounted. Beside the mark `needs_root`."""
    if reason := why_not():
        pytest.skip(reason)


@contextmanager
def tmpfs(where: Path, size: int, inodes: int | None = None) -> Iterator[Path]:
    where.mkdir(parents=True, exist_ok=True)
    options = f"size={size}" + (f",nr_inodes={inodes}" if inodes else "")
    _run("mount", "-t", "tmpfs", "-o", options, "surefoot-test", str(where))
    try:
        yield where
    finally:
        unmount(where)


@contextmanager
def ext4(image: Path, where: Path, size: int = 64 * MIB, options: str = "") -> Iterator[Path]:
    """A new ext4 in the sparse file `image`, mounted on `where`."""
    with image.open("xb") as file:
        file.truncate(size)
    _run("mkfs.ext4", "-q", "-E", "lazy_itable_init=1,lazy_journal_init=1", str(image))
    where.mkdir(parents=True, exist_ok=True)
    mount_image(image, where, options)
    try:
        yield where
    finally:
        unmount(where)
        image.unlink()


def mount_image(image: Path, where: Path, options: str = "") -> None:
    _run("mount", "-o", ",".join(filter(None, ("loop", options))), str(image), str(where))


def unmount(where: Path) -> None:
    """What is not mounted is left alone; what is busy goes when its last user does."""
    if not os.path.ismount(where):
        return
    try:
        _run("umount", str(where))
    except subprocess.CalledProcessError:
        _run("umount", "-l", str(where))


def fill(folder: Path, leave: int = 0) -> Path:
    """Take all free space of a file system but `leave` bytes, rounded down to pages. Returns the file that holds it."""
    filler = folder / "filler"
    free = shutil.disk_usage(folder).free
    descriptor = os.open(filler, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        wanted = max(0, free - leave)
        if wanted:
            os.posix_fallocate(descriptor, 0, wanted)
    finally:
        os.close(descriptor)
    return filler


def fill_by_writing(folder: Path) -> Path:
    """Write until the file system takes no more."""
    filler = folder / "filler"
    with suppress_full(), filler.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            os.fsync(file.fileno())
    return filler


def use_up_inodes(folder: Path, leave: int) -> Path:
    """Make empty files until only `leave` more can be made. Returns the folder that holds them."""
    holder = folder / "inodes"
    holder.mkdir()
    made: list[Path] = []
    with suppress_full():
        for number in itertools.count():
            path = holder / str(number)
            path.touch()
            made.append(path)
    for path in made[len(made) - leave :]:
        path.unlink()
    return holder


@contextmanager
def suppress_full() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


def fail_disk(mounted: Path) -> None:
    """What a disk error does to an ext4 that was mounted with errors=remount-ro: it is read-only from now on."""
    device = Path(_run("findmnt", "-n", "-o", "SOURCE", str(mounted)).strip()).name
    Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("test")


def cut_power(mounted: Path) -> None:
    """From now on the file system gives only errors, and what was not on the disk never gets there."""
    descriptor = os.open(mounted, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, _FS_IOC_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
    finally:
        os.close(descriptor)


def immutable(path: Path, on: bool) -> None:
    _run("chattr", "+i" if on else "-i", str(path))


_PATH = os.pathsep.join(filter(None, [os.environ.get("PATH"), "/usr/sbin", "/sbin"]))


def _run(*command: str) -> str:
    environment = {**os.environ, "PATH": _PATH, "LC_ALL": "C"}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
