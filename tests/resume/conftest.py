from tests.helpers.memory_path import memory_path, memory_path_of_session

__all__ = ["memory_path", "memory_path_of_session"]
