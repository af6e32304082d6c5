"""What a save costs: Surefoot against `torch.save` + fsync and the forms of DCP's `async_save`, in one table of ratios.

    python benchmarks/checkpoint.py            a state of 256 MiB, a minute or two
    python benchmarks/checkpoint.py --full     1 GiB in tensors of 64 MiB, as the targets ask for

Each way of saving runs in a process of its own, with one torch thread; their order alternates from round to round,
and each number is the median over the rounds. A "step" multiplies matrices for about a third of a drain's time, then
changes the whole state in place, as an optimizer does. The cost of a save is the wall time of a run with saves,
the last one drained, minus that of the same run without, over the number of saves.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 1 << 20
STEPS, SAVE_AT = 20, (0, 10)  # a save every ten steps, the last one with nine steps to drain in
METHODS = ("surefoot", "torch.save", "dcp thread", "dcp thread, async staging", "dcp process")


class Saver:
    """A way of saving: `save` starts one, `before_update` waits for what must be captured first, `wait` for the end."""

    def __init__(self, state: dict[str, Any], directory: Path) -> None:
        self.state, self.directory, self.count = state, directory, 0

    def save(self) -> None: ...

    def before_update(self) -> None: ...

    def wait(self) -> None: ...

    def busy(self) -> bool:
        return False

    def target(self) -> Path:
        self.count += 1
        return self.directory / f"save_{self.count}"

    def drop_old(self) -> None:
        """As retention would: keep one. Not part of what is timed."""
        for path in self.directory.glob("save_*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


class TorchSave(Saver):
    def save(self) -> None:
        import torch

        with self.target().open("wb") as file:
            torch.save(self.state, file)
            file.flush()
            os.fsync(file.fileno())


class Surefoot(Saver):
    def __init__(self, state: dict[str, Any], directory: Path) -> None:
        from surefoot.checkpoint import Arena, CheckpointManager

        super().__init__(state, directory)
        self.arena = Arena()
        self.arena.warm(state)
        self.manager = CheckpointManager({"checkpoint_dir": str(directory), "save_period": 1, "keep_top_k": 1})

    def settle(self) -> None: ...

    def restore(self, reader: Any) -> None: ...

    def snapshot(self) -> Any:
        captured = self.arena.capture(self.state)

        def write(sink: Any) -> None:
            with self.arena.draining():
                sink.tensors("model.safetensors", captured)

        return write

    def save(self) -> None:
        self.count += 1
        self.manager.offer(self.count, {"step": self.count}, {"policy": self}, final=False)

    def before_update(self) -> None:
        self.manager.raise_if_finalization_failed()

    def wait(self) -> None:
        self.manager.finalize_pending()

    def busy(self) -> bool:
        return self.manager.has_pending_finalization

    def drop_old(self) -> None:
        self.manager.shutdown()


class Dcp(Saver):
    def __init__(
        self, state: dict[str, Any], directory: Path, process: bool = False, async_staging: bool = False
    ) -> None:
        import torch.distributed as dist
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        super().__init__(state, directory)
        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
        self.kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        self.stager = DefaultStager(StagingOptions(False, process, async_staging, False))
        self.staged: Any = None
        self.written: Any = None

    def save(self) -> None:
        import torch.distributed.checkpoint as dcp

        self.wait()
        response = dcp.async_save(
            self.state, checkpoint_id=self.target(), async_checkpointer_type=self.kind, async_stager=self.stager
        )
        self.staged = getattr(response, "staging_completion", None)
        self.written = getattr(response, "upload_completion", response)

    def before_update(self) -> None:
        if self.staged is not None:
            self.staged.result()
            self.staged = None

    def wait(self) -> None:
        if self.written is not None:
            self.written.result()
            self.written = None

    def busy(self) -> bool:
        return self.written is not None and not self.written.done()


def make_saver(method: str, state: dict[str, Any], directory: Path) -> Saver:
    if method == "surefoot":
        return Surefoot(state, directory)
    if method == "torch.save":
        return TorchSave(state, directory)
    return Dcp(state, directory, process=method == "dcp process", async_staging="staging" in method)


# ------------------------------------------------------------------------------------ one method, in its own process


def make_state(num_bytes: int, tensor_bytes: int) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    return {f"layer_{i}": torch.randn(tensor_bytes // 4) for i in range(num_bytes // tensor_bytes)}


def make_step(state: dict[str, Any], seconds: float) -> Callable[[Callable[[], None]], None]:
    """A step that takes `seconds`: matrix products of the right number, then an update of the state in place."""
    import torch

    a, b = torch.randn(256, 256), torch.randn(256, 256)
    tensors = list(state.values())

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(a, b)

    multiply(50)
    torch._foreach_mul_(tensors, 1.0)
    started = time.perf_counter()
    torch._foreach_mul_(tensors, 1.0)
    update_s = time.perf_counter() - started
    started = time.perf_counter()
    multiply(200)
    times = max(1, int((seconds - update_s) / (time.perf_counter() - started) * 200))

    def step(before_update: Callable[[], None]) -> None:
        multiply(times)
        before_update()
        torch._foreach_mul_(tensors, 1.0)

    return step


class PeakMemory:
    """The most memory this process and its children held, sampled every 2 ms."""

    def __enter__(self) -> PeakMemory:
        self.start = self.peak = self._now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @staticmethod
    def _now() -> int:
        import psutil

        me = psutil.Process()
        return sum(process.memory_info().rss for process in (me, *me.children()) if process.is_running())

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, self._now())


def run_steps(
    step: Callable[[Callable[[], None]], None], saver: Saver | None
) -> tuple[float, list[float], list[float]]:
    """Wall seconds of one run, and the seconds of its steps outside and during a write."""
    quiet, during = [], []
    started = time.perf_counter()
    for number in range(STEPS):
        busy = saver is not None and saver.busy()
        began = time.perf_counter()
        step(saver.before_update if saver else lambda: None)
        (during if busy else quiet).append(time.perf_counter() - began)
        if saver is not None and number in SAVE_AT:
            saver.save()
    if saver is not None:
        saver.wait()
    return time.perf_counter() - started, quiet, during


def child(method: str, args: argparse.Namespace) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    directory = Path(tempfile.mkdtemp(prefix="bench-", dir=args.dir))
    try:
        state = make_state(args.mib * MIB, args.tensor_mib * MIB)
        step = make_step(state, args.step_s)
        with PeakMemory() as memory:
            saver = make_saver(method, state, directory)
            saver.save()  # buffers, processes and caches are made once
            saver.wait()
        saver.drop_old()
        with_saves, without, quiet, during = [], [], [], []
        for number in range(2):
            for saving in ((False, True), (True, False))[number % 2]:
                seconds, outside, inside = run_steps(step, saver if saving else None)
                (with_saves if saving else without).append(seconds)
                quiet += outside
                during += inside
                saver.drop_old()
        added = (statistics.mean(with_saves) - statistics.mean(without)) / len(SAVE_AT)
        result: dict[str, Any] = {"added_s": added, "quiet": quiet, "during": during}
        result["memory_mib"] = (memory.peak - memory.start) / MIB
        if method == "surefoot":
            result |= surefoot_rates(saver, state, directory, args)
        return result
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def surefoot_rates(saver: Saver, state: dict[str, Any], directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    from surefoot.checkpoint import LocalSink, verify_checkpoint

    assert isinstance(saver, Surefoot)
    manager = saver.manager
    polls = 200_000
    started = time.perf_counter()
    for _ in range(polls):
        manager.raise_if_finalization_failed()
    poll_us = (time.perf_counter() - started) / polls * 1e6
    gib = args.mib / 1024
    started = time.perf_counter()
    saver.arena.capture(state)
    capture_s = time.perf_counter() - started
    written, plain = [], []
    for number in range(2):
        for ours in ((False, True), (True, False))[number % 2]:
            folder = directory / f"rate_{number}_{ours}"
            folder.mkdir()
            os.sync()
            started = time.perf_counter()
            LocalSink(folder).tensors("t", state) if ours else write_plainly(folder / "t", state)
            (written if ours else plain).append(gib / (time.perf_counter() - started))
            shutil.rmtree(folder)
    path = manager.get_latest_checkpoint_path()
    assert path is not None
    verify_checkpoint(path)
    result = verify_checkpoint(path)
    assert result.sound
    return {
        "poll_us": poll_us,
        "capture_s": capture_s,
        "write_ratio": statistics.mean(written) / statistics.mean(plain),
        "verify_gib_s": result.num_bytes / 2**30 / result.seconds,
    }


def write_plainly(path: Path, state: dict[str, Any]) -> None:
    """The same bytes, in big sequential writes, and one fsync: the best that a disk is asked for."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    for tensor in state.values():
        data = memoryview(tensor.numpy()).cast("B")
        while data:
            data = data[os.write(descriptor, data) :]
    os.fsync(descriptor)
    os.close(descriptor)


# ------------------------------------------------------------------------------------------------- all of them


def in_process(method: str, args: argparse.Namespace, step_s: float) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    command = [sys.executable, __file__, "--child", method, "--step-s", str(step_s), "--dir", args.dir]
    command += ["--mib", str(args.mib), "--tensor-mib", str(args.tensor_mib)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def drain_seconds(args: argparse.Namespace) -> float:
    """How long this disk takes for the state, in big sequential writes."""
    state = make_state(args.mib * MIB, args.tensor_mib * MIB)
    seconds = []
    for _ in range(3):
        path = Path(args.dir) / "drain.bin"
        started = time.perf_counter()
        write_plainly(path, state)
        seconds.append(time.perf_counter() - started)
        path.unlink()
    return statistics.median(seconds)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def table(results: dict[str, list[dict[str, Any]]], args: argparse.Namespace, step_s: float, drain_s: float) -> str:
    added = {method: statistics.median(r["added_s"] for r in rounds) for method, rounds in results.items()}
    base, best_dcp = added["torch.save"], min(added[m] for m in METHODS if m.startswith("dcp"))
    lines = [
        f"state {args.mib} MiB in tensors of {args.tensor_mib} MiB; plain write + fsync {drain_s:.2f} s; step "
        f"{step_s:.2f} s; median of {len(results['surefoot'])} rounds; one torch thread",
        f"{'':28}{'added s/save':>14}{'of torch.save':>15}{'step median':>13}{'step p99':>10}{'memory / state':>16}",
    ]
    for method, rounds in results.items():
        quiet = [s for r in rounds for s in r["quiet"]]
        during = [s for r in rounds for s in r["during"]]
        median = percentile(during, 0.5) / percentile(quiet, 0.5) - 1
        p99 = percentile(during, 0.99) / percentile(quiet, 0.99) - 1
        memory = statistics.median(r["memory_mib"] for r in rounds) / args.mib
        steps = f"{median:>+13.1%}{p99:>+10.1%}" if during else f"{'–':>13}{'–':>10}"
        lines.append(f"{method:28}{added[method]:>14.3f}{added[method] / base:>15.2f}{steps}{memory:>16.2f}")
    ours = results["surefoot"]
    middle = {
        key: statistics.median(r[key] for r in ours) for key in ("poll_us", "capture_s", "write_ratio", "verify_gib_s")
    }
    lines += [
        f"surefoot / best form of DCP: {added['surefoot'] / best_dcp:.2f}   (target ≤ 1)",
        f"surefoot / torch.save + fsync: {added['surefoot'] / base:.2f}   (target ≤ 0.15)",
        f"poll: {middle['poll_us']:.2f} µs   (target ≤ 1)",
        f"arena capture: {middle['capture_s']:.3f} s, {args.mib / 1024 / middle['capture_s']:.1f} GiB/s",
        f"write rate / plain sequential write + fsync: {middle['write_ratio']:.2f}   (target ≥ 0.90)",
        f"verify: {middle['verify_gib_s']:.1f} GiB/s on one core   (target ≥ 3)",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="1 GiB in tensors of 64 MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", default=".", help="a directory on the disk to measure")
    parser.add_argument("--mib", type=int, default=None)
    parser.add_argument("--tensor-mib", type=int, default=None)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--step-s", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.mib = args.mib or (1024 if args.full else 256)
    args.tensor_mib = args.tensor_mib or (64 if args.full else 16)
    if args.child:
        print(json.dumps(child(args.child, args)))
        return
    with tempfile.TemporaryDirectory(prefix="surefoot-bench-", dir=args.dir) as directory:
        args.dir = str(Path(directory).absolute())  # DCP takes a file:// address, which has no relative form
        drain_s = drain_seconds(args)
        step_s = drain_s / 3
        results: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
        for number in range(args.rounds):
            for method in METHODS if number % 2 == 0 else reversed(METHODS):
                results[method].append(in_process(method, args, step_s))
            print(f"after round {number + 1} of {args.rounds}:", file=sys.stderr)
            print(table(results, args, step_s, drain_s), file=sys.stdout if number + 1 == args.rounds else sys.stderr)


if __name__ == "__main__":
    main()
