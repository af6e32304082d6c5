"""Every error that Surefoot raises on purpose.

A message names what was found, where, what was expected and what to do. The command line prints it without a
traceback; anything that is not a `SurefootError` is a bug and keeps its traceback.
"""


class SurefootError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 1


class ConfigError(SurefootError, ValueError):
    """The configuration cannot be run as it stands. Names the key's path, the value and what was expected. A
    `ValueError` too, so that a section's own checks may raise it."""

    exit_code = 2


class DataError(SurefootError):
    """A data file or a row cannot be used. Names the file, the line, the field and the type found."""


class ModelError(SurefootError):
    """A model, a tokenizer or a chat template cannot be loaded or does not fit."""


class NonFiniteError(SurefootError):
    """A loss, a gradient norm or a weight is NaN or infinite. Nothing was updated with it, nothing is saved from it."""


class RolloutError(SurefootError):
    """Rollouts cannot be made: all failed, or none of them has anything to learn from. Has the counts and a cause."""


class StaleWeights(SurefootError):
    """A generator has other weights than the ones last published. Training on what it samples would be wrong."""


class NothingTrained(SurefootError):
    """A run ended by itself without one training step. That is no success, unless it was finished before."""


class CheckpointError(SurefootError):
    """A checkpoint or a checkpoint directory cannot be used as asked."""


class CorruptCheckpoint(CheckpointError):
    """A directory does not agree with its manifest, or has none: it is not a checkpoint."""


class ResumeRefused(CheckpointError):
    """The run on disk and the run asked for differ in something that may not change. Names both values."""


class StorageFailed(SurefootError):
    """A disk no longer takes what the run must write. The state in memory is sound: `rescue_dir` may still take it."""


class SaveFailed(StorageFailed, RuntimeError):
    """A background save failed. Its message begins with "Background checkpoint finalization failed"; `__cause__` is
    what the writer raised.

    Attributes:
        step: the step whose save failed.
        path: the temporary directory left for inspection, as a string.
    """

    def __init__(self, message: str, *, step: int, path: str) -> None:
        super().__init__(message)
        self.step = step
        self.path = path


class StopRequested(SurefootError):
    """A signal or the deadline asked the run to stop. Raised by `poll`, consumed by the loop, which saves and ends.

    Attributes:
        reason: in words, for the closing line.
        exit_code: 128 + signal number, or 0 for the deadline.
    """

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.exit_code = exit_code
