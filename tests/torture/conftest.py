from tests.helpers.memory_path import memory_path, memory_path_of_session
from tests.helpers.mounts import can_mount

__all__ = ["can_mount", "memory_path", "memory_path_of_session"]
