"""The only loop. Every algorithm runs through it, and nothing else saves, stops or looks for a failed save.

Each call below decides for itself whether it has something to do: `enrich` may add nothing, `publish` does nothing
where nothing generates, `offer` saves only when the policy says so.
"""

from __future__ import annotations

from concurrent.futures import Future

from surefoot.errors import NothingTrained, StopRequested, StorageFailed
from surefoot.run import Outcome, Run
from surefoot.types import Metrics, Poll, merge_metrics


def train(run: Run) -> Outcome:
    """Turn the loop until a limit, the data's end, a signal or the deadline, and leave the last step saved.

    Raises:
        SaveFailed: a background save failed; no step was trained after its failure was seen.
        StorageFailed: the metrics cannot be written.
        NonFiniteError: a loss or gradient norm is not finite; nothing was saved from that step.
        NothingTrained: the run ended by itself without one training step, and was not finished before.
    """
    clock, started = run.clock, run.clock.step

    def poll() -> None:
        """Never waits. Refused the lock, it skips: whoever holds it is saving, and the next poll will see."""
        if run.checkpoints.save_lock.acquire(blocking=False):
            try:
                run.checkpoints.raise_if_finalization_failed()
            finally:
                run.checkpoints.save_lock.release()
        run.stop.check()

    try:
        with run.stop, run.report, run.checkpoints:
            try:
                outcome = Outcome(0, _turn(run, poll), exit_code=0)
            except StopRequested as stop:
                outcome = Outcome(0, stop.reason, stop.exit_code)
            if clock.step == started and outcome.exit_code == 0:
                outcome = _finished(run, outcome.reason)
            if clock.step > started:
                _save_if_due(run, final=True)
    except StorageFailed as failure:
        failure.args = ("\n".join([str(failure), *_rescue(run)]),)
        raise
    finally:
        run.source.close()
    return Outcome(clock.step - started, outcome.reason, outcome.exit_code)


def _finished(run: Run, reason: str) -> Outcome:
    """Of a run that ended by itself without one step: right where all its steps were done before, else an error."""
    limits, step = " and ".join(limits_reached(run)), run.clock.step
    if not step or not limits:
        raise NothingTrained(f"no training step was done: {reason}, the run is at step {step}")
    return Outcome(0, f"nothing to do, the run is finished: {reason}; to go on, raise {limits}", exit_code=0)


def limits_reached(run: Run) -> list[str]:
    """The keys that have ended the run by themselves. Unless they are raised, a resume does nothing."""
    steps = run.limits.max_num_steps
    reached = [] if steps is None or run.clock.step < steps else ["max_num_steps"]
    return [*reached, "max_num_epochs"] if run.source.exhausted else reached


def _turn(run: Run, poll: Poll) -> str:
    """Step after step. Returns the reason why there is no next one."""
    clock, kit, algorithm, phase = run.clock, run.kit, run.algorithm, run.report.phase
    _publish(run)
    _validate_if_due(run, poll)
    while run.limits.max_num_steps is None or clock.step < run.limits.max_num_steps:
        poll()
        run.stop.check_deadline()
        with phase("data"):
            batch = run.source.take(clock, poll)
        if batch is None:
            return run.source.exhausted
        with phase("enrich"):
            batch = algorithm.enrich(batch, kit)
        metrics: Metrics = merge_metrics([run.source.metrics, algorithm.metrics])
        for objective in algorithm.objectives(clock):
            with phase("train"):
                trained = kit.engines[objective.engine].train(batch, objective)
            metrics = merge_metrics([metrics, _named(objective.engine, trained)])
        algorithm.observe(metrics, kit)
        clock.advance(batch, run.source.epoch)
        with phase("sync"):
            run.source.retire(batch, live=_publish(run))
        run.report.step(clock, metrics)
        _validate_if_due(run, poll)
        _save_if_due(run)
    return f"max_num_steps ({run.limits.max_num_steps}) reached"


def _publish(run: Run) -> Future[int]:
    return run.sync.publish(run.kit.engines["policy"].weights, run.clock.version)


def _named(engine: str, metrics: Metrics) -> Metrics:
    """The policy's metrics keep their names; another engine's carry its name in front."""
    return metrics if engine == "policy" else {f"{engine}/{name}": metric for name, metric in metrics.items()}


def _validate_if_due(run: Run, poll: Poll) -> None:
    """A validation that a signal cut short is due again when the run resumes."""
    clock, limits = run.clock, run.limits
    at_end = clock.step == limits.max_num_steps or bool(run.source.exhausted)
    due = clock.step % limits.val_period == 0 if limits.val_period else False
    due = limits.val_at_start if clock.step == 0 else due or (at_end and limits.val_at_end)
    if due and clock.validated != clock.step:
        with run.report.phase("validate"):
            metrics = run.algorithm.evaluate(run.kit, poll)
        clock.validated = clock.step
        run.report.validation(clock, metrics)


def _save_if_due(run: Run, final: bool = False) -> None:
    with run.report.phase("last save" if final else "save"):  # the last one holds no training up
        run.checkpoints.offer(run.clock.step, run.report.training_info(run.clock), run.parts, final)


def _rescue(run: Run) -> list[str]:
    """The live state is newer than what is on disk: save it elsewhere, if the user named a place. Says how it went."""
    step = run.clock.step
    if step == 0:
        return []
    try:
        path = run.checkpoints.rescue(step, run.report.training_info(run.clock), run.parts)
    except Exception as error:
        return [f"The rescue of step {step} failed too: {error}"]
    return [] if path is None else [f"Step {step} is saved at {path}; resume with --from {path}"]
