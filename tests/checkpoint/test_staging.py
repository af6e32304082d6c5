from __future__ import annotations

import threading

import pytest
import torch

from surefoot.checkpoint import Arena
from surefoot.types import Stager


def state() -> dict[str, torch.Tensor]:
    return {
        "w": torch.arange(12.0).reshape(3, 4),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "flag": torch.tensor([True, False, True]),
        "step": torch.tensor(7),
        "none": torch.empty(0, 3),
        "view": torch.arange(6.0).reshape(2, 3).t(),
        "leaf": torch.ones(2, requires_grad=True),
    }


def test_a_capture_is_a_copy_that_later_changes_do_not_reach() -> None:
    arena: Stager = Arena()
    live = state()
    before = {name: tensor.detach().clone() for name, tensor in live.items()}
    captured = arena.capture(live)
    with torch.no_grad():
        for tensor in live.values():
            tensor.zero_()
    assert captured.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(captured[name], tensor), name
        assert captured[name].dtype == tensor.dtype
        assert captured[name].is_contiguous()
        assert not captured[name].requires_grad


def test_warming_once_serves_all_captures_of_that_shape() -> None:
    arena = Arena()
    arena.warm(state())
    first = arena.capture(state())["w"].data_ptr()
    assert arena.capture({**state(), "w": torch.zeros(3, 4)})["w"].data_ptr() == first
    assert arena.num_bytes == sum(tensor.numel() * tensor.element_size() for tensor in state().values())


@pytest.mark.parametrize(
    "change", [{"w": torch.zeros(9)}, {"w": torch.zeros(3, 4, dtype=torch.float64)}, {"new": torch.ones(2)}]
)
def test_other_tensors_get_room_of_their_own(change: dict[str, torch.Tensor]) -> None:
    arena = Arena()
    arena.warm(state())
    captured = arena.capture({**state(), **change})
    for name, tensor in {**state(), **change}.items():
        assert torch.equal(captured[name], tensor)


def test_nothing_to_capture() -> None:
    assert Arena().capture({}) == {}


def test_capturing_what_is_still_being_written_is_refused() -> None:
    arena = Arena()
    arena.capture(state())
    entered, leave = threading.Event(), threading.Event()

    def drain() -> None:
        with arena.draining():
            entered.set()
            assert leave.wait(20)

    writer = threading.Thread(target=drain)
    writer.start()
    assert entered.wait(20)
    with pytest.raises(RuntimeError, match="still being written"):
        arena.capture(state())
    leave.set()
    writer.join()
    arena.capture(state())


def test_a_writer_that_fails_lets_go() -> None:
    arena = Arena()
    with pytest.raises(KeyError), arena.draining():
        raise KeyError
    arena.capture(state())
