"""Log records on the same console as the progress, so that they do not tear the live view."""

from __future__ import annotations

import logging
from datetime import datetime

from rich.console import Console
from rich.text import Text

_STYLES = {logging.WARNING: "yellow", logging.ERROR: "bold red", logging.CRITICAL: "bold red"}


class ConsoleHandler(logging.Handler):
    """Prints one record as one line, above the live view where there is one. rich's own handler sets records in a table
    of the terminal's width, which breaks long lines in a log file."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = Text(f"{datetime.fromtimestamp(record.created):%H:%M:%S} ", "dim")
            if record.levelno != logging.INFO:
                text.append(f"{record.levelname.lower()}: ", _STYLES.get(record.levelno, "dim"))
            self.console.print(text.append(self.format(record), "not dim"), soft_wrap=True, highlight=False)
        except (Exception, SystemExit):  # rich exits the process when a pipe's reader is gone
            self.handleError(record)


def configure_logging(console: Console, level: int | str = logging.INFO) -> None:
    """Send all log records to `console`: Surefoot's from `level` on, those of libraries from WARNING on.

    May be called again, with another console or level.
    """
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, ConsoleHandler)]:
        root.removeHandler(handler)
    root.addHandler(ConsoleHandler(console))
    logging.getLogger("surefoot").setLevel(level)
