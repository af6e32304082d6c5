from tests.helpers.memory_path import memory_path

__all__ = ["memory_path"]
