"""Log records on the same console as the progress, so that they do not tear the live view."""

from __future__ import annotations

import logging
from datetime import datetime

from rich.console import Console
from rich.text import Text


class ConsoleHandler(logging.Handler):
    """Prints one record as one line, above the live view where there is one. rich's own handler sets records in a table
    of the terminal's width, which breaks long lines in a log file."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        style = "red" if record.levelno >= logging.ERROR else "yellow" if record.levelno == logging.WARNING else ""
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        try:
            text = f"{datetime.fromtimestamp(record.created):%H:%M:%S} {level}{self.format(record)}"
            self.console.print(Text(text, style), soft_wrap=True)
        except (Exception, SystemExit):  # rich exits the process when a pipe's reader is gone
            self.handleError(record)


def configure_logging(console: Console, level: int | str = logging.INFO) -> None:
    """Send all log records to `console`: Surefoot's from `level` on, those of libraries from WARNING on.

    May be called again, with another console or level.
    """
    root = logging.getLogger()
    root.handlers = [handler for handler in root.handlers if not isinstance(handler, ConsoleHandler)]
    root.addHandler(ConsoleHandler(console))
    logging.getLogger("surefoot").setLevel(level)
