"""Checkpoints: written in the background, committed atomically, proven on disk. Start reading at `manager.py`."""

from surefoot.checkpoint.cache import TensorCache, cache_home
from surefoot.checkpoint.directory import CheckpointInfo
from surefoot.checkpoint.export import export_merged, export_weights
from surefoot.checkpoint.inspection import Description, Difference, describe, diff
from surefoot.checkpoint.manager import CheckpointManager
from surefoot.checkpoint.manifest import Fingerprint, Manifest, check_fingerprints, read_manifest
from surefoot.checkpoint.processes import die_with_parent, wait_for_processes
from surefoot.checkpoint.reader import LocalReader
from surefoot.checkpoint.resume import ResumePoint
from surefoot.checkpoint.sink import LocalSink
from surefoot.checkpoint.staging import Arena
from surefoot.checkpoint.verify import Verification, open_verified, verify_checkpoint

__all__ = [
    "Arena",
    "CheckpointInfo",
    "CheckpointManager",
    "Description",
    "Difference",
    "Fingerprint",
    "LocalReader",
    "LocalSink",
    "Manifest",
    "ResumePoint",
    "TensorCache",
    "Verification",
    "cache_home",
    "check_fingerprints",
    "describe",
    "die_with_parent",
    "diff",
    "export_merged",
    "export_weights",
    "open_verified",
    "read_manifest",
    "verify_checkpoint",
    "wait_for_processes",
]
