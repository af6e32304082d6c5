"""The demo's folder: an earlier demo is moved aside, then data, a tokenizer and a configuration are put there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from surefoot.checkpoint.commit import set_aside
from surefoot.checkpoint.directory import LOCK, DirectoryLock
from surefoot.demo import task
from surefoot.demo.recipe import SFT
from surefoot.errors import SurefootError

MARKER = ".surefoot_demo"


class DemoFolder:
    """Where things lie. `moved_to`: where an earlier demo went, if there was one."""

    def __init__(self, root: Path, moved_to: Path | None = None) -> None:
        self.root, self.moved_to = root, moved_to
        self.data = root / "data"
        self.train = self.data / "train.jsonl"
        self.heldout = self.data / "heldout.jsonl"
        self.tokenizer = root / "tokenizer"
        self.config = SFT.config(root)

    def fill(self, seed: int) -> None:
        """Write the data, train the tokenizer on it, write the configuration."""
        task.write_dataset(self.train, self.heldout, seed)
        task.train_tokenizer(task.read_rows(self.train), self.tokenizer)
        SFT.write(self.root, seed)


@contextmanager
def claimed(root: Path) -> Iterator[DemoFolder]:
    """The folder, new and locked while the demo runs. An earlier demo is moved to `<root>.bak_1` ….

    Raises:
        SurefootError: something that is no demo's is there, another demo is running there, or it cannot be made.
    """
    root = root if root.name else root.absolute()  # "." would go with the folder that is moved
    found = sorted(path.name for path in root.glob("*") if path.name != LOCK)
    if root.is_symlink() or root.is_file() or (found and MARKER not in found):
        what = f"holds files that are not a demo's ({', '.join(found[:5])})" if found else "is a link or a file"
        raise SurefootError(f"{root} {what}. Name a new folder with --dir")
    moved_to = None
    with ExitStack() as locks:
        try:
            locks.callback(_locked(root).release)
            if found:
                moved_to = set_aside(root, root.name)
                locks.callback(_locked(root).release)
        except OSError as error:
            raise SurefootError(f"{root} cannot be used: {error.strerror}. Name another with --dir") from error
        yield DemoFolder(root, moved_to)


def _locked(root: Path) -> DirectoryLock:
    root.mkdir(parents=True, exist_ok=True)
    (root / MARKER).touch()
    return DirectoryLock(root)
