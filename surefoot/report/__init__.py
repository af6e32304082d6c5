"""Live progress, `metrics.jsonl`, TensorBoard and Weights & Biases, fed from one place."""

from surefoot.report.console import ConsoleHandler, configure_logging
from surefoot.report.report import RunReport

__all__ = ["ConsoleHandler", "RunReport", "configure_logging"]
