"""The demo's folder: an earlier demo is moved aside, then data, a tokenizer and the configurations are put there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from surefoot.checkpoint.commit import set_aside
from surefoot.checkpoint.directory import LOCK, DirectoryLock
from surefoot.demo import task
from surefoot.demo.measure import Heldout
from surefoot.demo.stages import STAGES, WRONG_SHARE
from surefoot.errors import SurefootError

MARKER = ".surefoot_demo"


class DemoFolder:
    """Where things lie. `moved_to`: where an earlier demo went, if there was one."""

    def __init__(self, root: Path, moved_to: Path | None = None) -> None:
        self.root, self.moved_to = root, moved_to
        self.data = root / "data"
        self.tokenizer, self.other_tokenizer = root / "tokenizer", root / "other_tokenizer"

    def rows(self, name: str) -> list[task.Row]:
        return task.read_rows(self.data / f"{name}.jsonl")

    def fill(self, seed: int) -> Heldout:
        """Write the true sums, demonstrations that are mostly wrong, preferences of two kinds; train two
        tokenizers; write the configurations. Returns what is held out."""
        task.write_dataset(self.data / "train.jsonl", self.data / "heldout.jsonl", seed)
        train, heldout = self.rows("train"), self.rows("heldout")
        task.write_demonstrations(train, self.data / "demonstrations.jsonl", seed, WRONG_SHARE)
        for name, wrong in (("guesses", task.guess), ("slips", task.slip)):
            task.write_preferences(train, self.data / f"{name}.jsonl", seed, wrong)
            task.write_preferences(heldout, self.data / f"{name}_heldout.jsonl", seed, wrong)
        task.train_tokenizer(train, self.tokenizer)
        task.train_tokenizer(train, self.other_tokenizer, task.TRIPLES)
        for stage in STAGES:
            stage.recipe.write(self.root, seed)
        return Heldout(heldout, self.rows("guesses_heldout"), self.rows("slips_heldout"), seed)


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
