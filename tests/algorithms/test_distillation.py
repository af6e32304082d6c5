"""Distillation in real runs, on-policy and offline: the same teacher, padded vocabularies, several teachers, mixtures,
the reward form, precomputed outputs, and refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer

from surefoot import loop
from surefoot.engine.local import LocalEngine
from surefoot.errors import ConfigError, DataError, ModelError, NonFiniteError
from surefoot.losses.distill import DIVERGENCES
from surefoot.run import Run
from surefoot.types import BatchRef, Metric
from tests.helpers import runs

UNSAVED = ("checkpointing.enabled=false", "val_period=0")
WHOLE = "distillation.top_k=null"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return runs.write_project(tmp_path, case="distillation")


@pytest.fixture
def offline(tmp_path: Path) -> Path:
    return runs.write_project(tmp_path, case="distillation-offline")


def lines(run_dir: Path, kind: str = "train") -> list[dict[str, Any]]:
    return [line for line in runs.metric_lines(run_dir) if line["kind"] == kind]


def enriched(run: Run) -> BatchRef:
    loop._publish(run)
    batch = run.source.take(run.clock, lambda: None)
    assert batch is not None
    return run.algorithm.enrich(batch, run.kit)


def measured(run: Run, batch: BatchRef) -> dict[str, float]:
    (objective,) = run.algorithm.objectives(run.clock)
    return {name: m.value for name, m in run.kit.engines["policy"].evaluate(batch, objective).items()}


def column(run: Run, batch: BatchRef, name: str) -> Any:
    return run.kit.plane.get(batch, [name])[name]


def of_student(file: Path, folder: Path) -> str:
    """The student's own weights as its teacher's."""
    runs.write_model(folder, file, seed=7, initializer_range=0.05)
    return f"{{model: {folder}}}"


# ------------------------------------------------------------------------------------------------ the same distribution


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("options", [(WHOLE,), ("distillation.top_k=3",), ("distillation.tail=renormalise",)], ids=str)
def test_a_teacher_that_is_the_student_teaches_nothing(file: Path, name: str, options: tuple[str, ...]) -> None:
    """Acceptance 1, at every position, through models, rollouts and columns."""
    teacher = of_student(file, file.parent / "same")
    run = runs.started(
        file, f"distillation.teachers=[{teacher}]", f"distillation.divergence={name}", *options, *UNSAVED
    )
    batch = enriched(run)
    (objective,) = run.algorithm.objectives(run.clock)
    engine: Any = run.kit.engines["policy"]
    (rows,) = engine._batches(batch.rows(0, 2), objective)
    out = engine._forward(rows, objective.head, rows.columns["loss_mask"])
    assert out["teacher/divergence"].abs().max() < 1e-6
    assert measured(run, batch)["loss"] == pytest.approx(0.0, abs=1e-6)
    trained = engine.train(batch, objective)
    assert trained["grad_norm"].value < 1e-5
    run.source.close()


def test_the_whole_vocabulary_is_the_top_k_of_all(file: Path) -> None:
    """By hidden states and the teacher's head, or by columns: the same numbers."""
    found = []
    for k in ("null", "19"):
        run = runs.started(file, f"distillation.top_k={k}", f"run_dir={file.parent / k}", *UNSAVED)
        found.append(measured(run, enriched(run)))
        run.source.close()
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-5)
    assert found[1]["kept_mass"] == found[1]["teacher_kept_mass"] == 1.0


def test_the_loss_is_the_kl_of_the_two_models(file: Path) -> None:
    """Worked out from Transformers' own logits, at a temperature; only the student's own tokens count."""
    run = runs.started(file, WHOLE, "distillation.temperature=2", *UNSAVED)
    batch = enriched(run)
    student, teacher = (run.kit.engines[name].model for name in ("policy", "teacher"))  # type: ignore[attr-defined]
    total, count = 0.0, 0
    for ids, mask in zip(column(run, batch, "input_ids"), column(run, batch, "loss_mask"), strict=True):
        with torch.no_grad():
            q, p = ((model(ids[None]).logits[0, :-1] / 2).log_softmax(-1) for model in (student, teacher))
        total += float(((q.exp() * (q - p)).sum(-1) * mask[1:]).sum())
        count += int(mask.sum())
    assert measured(run, batch)["loss"] == pytest.approx(total / count, rel=1e-5)
    run.source.close()


def test_it_learns_what_its_teacher_knows(file: Path) -> None:
    """On-policy: the student's own answers come to be as likely under the teacher as under itself."""
    options = ("policy.optimizer.lr=0.03", "policy.scheduler.name=constant", "max_num_steps=40")
    runs.trained(file, *UNSAVED, *options)
    losses = [line["loss"] for line in lines(file.parent / "run")]
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


# -------------------------------------------------------------------------------------------------- padded vocabularies


@pytest.mark.parametrize(("student", "teacher"), [(24, 32), (32, 24)])
@pytest.mark.parametrize("top_k", ["null", "3", "19"])
def test_padded_vocabularies_are_compared_on_the_shared_part(
    file: Path, student: int, teacher: int, top_k: str
) -> None:
    """G1. The tokenizer has 19 tokens. Whatever the padding's logits are, it has no probability and is in no top k."""
    runs.write_model(file.parent / "padded", file, seed=3, vocab_size=teacher)
    sizes = (f"policy.model_init.vocab_size={student}", f"distillation.top_k={top_k}")
    run = runs.started(file, *sizes, f"distillation.teachers=[{{model: {file.parent / 'padded'}}}]", *UNSAVED)
    losses = []
    for shift in (0.0, 5.0):
        for name in ("policy", "teacher"):
            model: Any = run.kit.engines[name].model  # type: ignore[attr-defined]
            with torch.no_grad():  # embeddings are tied: padding ids' logits grow, and nothing else
                model.get_input_embeddings().weight[19:] *= 1 + shift
        batch = run.algorithm.enrich(drawn_known(run), run.kit)
        if top_k != "null":
            assert max(int(row.max()) for row in column(run, batch, "teacher/topk_ids")) < 19
        losses.append(measured(run, batch)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] > 1e-3
    run.source.close()


def drawn_known(run: Run) -> BatchRef:
    """Two rows of known tokens."""
    ids = [torch.tensor([1, 5, 6, 7, 8]), torch.tensor([2, 3, 9])]
    ref = BatchRef(("a_g0", "b_g0"), ("a", "b"), (5, 3), (0, 0), frozenset())
    return run.kit.plane.put(
        ref, {"input_ids": ids, "loss_mask": [(torch.arange(len(row)) > 1).float() for row in ids]}
    )


def test_a_padding_id_that_the_student_drew_ends_what_is_trained(file: Path) -> None:
    """The teacher has no such id. What comes before it is trained as if the rest were not there."""
    run = runs.started(file, "policy.model_init.vocab_size=32", *UNSAVED)
    ref = run.kit.plane.put(drawn_known(run), {"input_ids": [torch.tensor([1, 5, 6, 30, 8]), torch.tensor([2, 3, 9])]})
    ref = run.algorithm.enrich(ref, run.kit)
    assert [mask.tolist() for mask in column(run, ref, "loss_mask")] == [[0, 0, 1, 0, 0], [0, 0, 1]]
    assert measured(run, ref)["num_tokens"] == 2
    run.source.close()


# ------------------------------------------------------------------------------------------------------- several, mixed


def with_sources(file: Path) -> None:
    for path in (file.parent / "train.jsonl", file.parent / "heldout.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        marked = [{**row, "kind": ("even", "odd")[i % 2]} for i, row in enumerate(rows)]
        path.write_text("".join(json.dumps(row) + "\n" for row in marked))


BY_SOURCE = "[{{model: {0}/teacher_1, sources: [even]}}, {{model: {0}/teacher_2, sources: [odd]}}]"


@pytest.mark.parametrize("case", ["distillation", "distillation-offline"])
@pytest.mark.parametrize("top_k", ["3", "null"])
def test_teachers_by_data_source(tmp_path: Path, case: str, top_k: str) -> None:
    file = runs.write_project(tmp_path, case=case)
    with_sources(file)
    section = case.replace("-", "_")
    kept = ("distillation_offline.precompute=false", "distillation_offline.cache=null") * ("offline" in case)
    run = runs.started(
        file,
        f"{section}.teachers={BY_SOURCE.format(tmp_path)}",
        f"{section}.top_k={top_k}",
        "data.train.columns={source: kind}",
        *("policy.train_micro_batch_size=4", *kept, *UNSAVED),
    )
    batch = enriched(run)
    sources = column(run, batch, "source")
    assert set(sources) == {"even", "odd"}
    for name, taught in (("teacher_1", "even"), ("teacher_2", "odd")):
        assert column(run, batch, f"{name}/weight").tolist() == [float(source == taught) for source in sources]
        for source, values in zip(sources, column(run, batch, f"{name}/logprobs"), strict=True):
            assert values.any() == (source == taught)
    found = measured(run, batch)
    parts = [found["loss/teacher_1"], found["loss/teacher_2"]]
    assert min(parts) <= found["loss"] <= max(parts)
    other = f"{section}.teachers={BY_SOURCE.format(tmp_path).replace('odd', 'law')}"
    run.source.close()
    run = runs.started(file, other, "data.train.columns={source: kind}", f"run_dir={tmp_path / 'b'}", *kept, *UNSAVED)
    with pytest.raises(ConfigError, match="teachers: none of them teaches rows whose source is"):
        loop.train(run)


def test_some_prompts_are_answered_by_the_data_set(file: Path) -> None:
    """Half of them, drawn by the seed: prompts with the answers of the file, as SFT would have them."""
    runs.trained(file, *UNSAVED, "distillation.student_fraction=0.5", "max_num_steps=5")
    chats = [json.loads(line)["messages"] for line in (file.parent / "train.jsonl").read_text().splitlines()]
    answers = {chat[0]["content"]: chat[1]["content"] for chat in chats}
    rows = [row for path in (file.parent / "run/completions").iterdir() for row in pq.read_table(path).to_pylist()]
    told = [row for row in rows if row["answered_by"] == "dataset"]
    assert all(row["completion"] == answers[row["prompt"]] for row in told)
    assert {row["answered_by"] for row in rows} == {"dataset", "policy"}
    assert 4 <= len(told) <= 16, f"{len(told)} of {len(rows)}"
    assert all(row["finish_reason"] == "stop" and row["tokens"] == len(row["completion"]) + 1 for row in told)


def test_rewards_are_measured_on_the_students_own_answers(file: Path) -> None:
    """The data set's are right by themselves."""
    judged = (*UNSAVED, "rewards=[{name: exact_match}]", "max_num_steps=2", "distillation.num_prompts_per_step=8")
    columns = "data.train.columns={}"
    for fraction in ("0.5", "0"):
        run_dir = file.parent / fraction
        runs.trained(file, *judged, columns, f"distillation.student_fraction={fraction}", f"run_dir={run_dir}")
        for line in (line for line in runs.metric_lines(run_dir) if line["kind"] == "train"):
            rows = pq.read_table(run_dir / f"completions/step_{line['step']}.parquet").to_pylist()
            own = [row for row in rows if row["answered_by"] == "policy"]
            assert bool(own) == (fraction == "0.5") == ("reward" in line)
            assert not own or line["reward"] == pytest.approx(sum(row["reward"] for row in own) / len(own))


def test_all_prompts_are_answered_by_a_teacher(file: Path) -> None:
    """What it says is likely to it, and all of it is the teacher's own at temperature 0.2."""
    run = runs.started(
        file,
        *("distillation.student_fraction=0", "distillation.others=teacher", "generation.temperature=0.2", *UNSAVED),
    )
    found = measured(run, enriched(run))
    assert found["teacher_nll"] < 1.5 < found["student_nll"]
    run.source.close()


def test_a_prompt_without_an_answer_is_named(file: Path) -> None:
    asked = [{"prompt": f"{i}+1="} for i in range(10, 30)]
    (file.parent / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    with pytest.raises(DataError, match=r"train.jsonl:1 has no text as its `answer`, nor have 19 others"):
        runs.started(file, "distillation.student_fraction=0.5")


def test_off_policy_nothing_is_sampled_and_validation_is_on_the_answers(file: Path) -> None:
    """Neither is a second copy of the policy in memory."""
    off = ("distillation.student_fraction=0", "max_num_steps=2", *UNSAVED, "val_period=2")
    run = runs.started(file, *off)
    assert not run.kit.rollouts._generators
    loop.train(run)
    (line,) = [line for line in runs.metric_lines(file.parent / "run") if line["kind"] == "val"][-1:]
    assert line["heldout/answer_nll"] == pytest.approx(line["student_nll"], abs=1e-5)
    assert not {"truncated", "completion_tokens"} & line.keys()
    (file.parent / "heldout.jsonl").write_text('{"prompt": "1+1="}\n')
    with pytest.raises(DataError, match=r"heldout.jsonl:1 has no text as its `answer`"):
        runs.started(file, *off, "run_dir=" + str(file.parent / "again"))


def test_only_the_students_own_tokens_of_several_turns(file: Path) -> None:
    """What an environment said between two turns is read, and neither teacher nor loss looks at how likely it is."""
    run = runs.started(file, *UNSAVED)
    mask = torch.tensor([0.0, 1, 1, 0, 0, 0, 1])
    ref = BatchRef(("a_g0",), ("a",), (7,), (0,), frozenset())
    run.kit.plane.put(ref, {"input_ids": [torch.arange(1, 8)], "loss_mask": [mask]})
    ref = run.algorithm.enrich(ref, run.kit)
    (said,) = column(run, ref, "teacher/logprobs")
    assert torch.equal(said != 0, mask != 0)
    assert measured(run, ref)["num_tokens"] == 3
    run.source.close()


# ------------------------------------------------------------------------------------------------------ the reward form


def test_the_advantage_is_how_much_likelier_the_teacher_finds_a_token(tmp_path: Path) -> None:
    file = runs.write_project(tmp_path, case="distillation-reward")
    run = runs.started(file, "generation.temperature=0.7", "max_num_steps=1", *UNSAVED)
    batch = enriched(run)
    names = ("input_ids", "loss_mask", "advantages")
    student, teacher = (run.kit.engines[name].model for name in ("policy", "teacher"))  # type: ignore[attr-defined]
    total = 0.0
    for ids, mask, found in zip(*(column(run, batch, name) for name in names), strict=True):
        with torch.no_grad():
            q, p = (
                (m(ids[None]).logits[0, :-1] / 0.7).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
                for m in (student, teacher)
            )
        torch.testing.assert_close(found[1:], (p - q) * mask[1:], rtol=1e-4, atol=1e-5)
        total += float((q - p) @ mask[1:])
    kl: Metric = run.algorithm.metrics["reverse_kl"]
    assert kl.value == pytest.approx(total / kl.weight, rel=1e-4)
    run.source.close()


def test_the_reward_forms_gradient_is_in_expectation_that_of_the_reverse_kl() -> None:
    """One token of a free softmax: over all that may be sampled, the policy gradient with advantage p − q is the
    gradient of KL(student‖teacher)."""
    from surefoot.losses.distill import reverse_kl
    from surefoot.losses.policy import PolicyLoss

    logits = torch.tensor([0.3, -1.2, 0.9, 0.1], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([-0.5, 0.4, 0.2, 1.1], dtype=torch.float64).log_softmax(0)
    student = logits.log_softmax(0)
    (expected,) = torch.autograd.grad(reverse_kl(student, teacher), logits, retain_graph=True)
    loss, total = PolicyLoss(force_on_policy_ratio=True), torch.zeros((), dtype=torch.float64)
    for token in range(4):
        row = student[token].reshape(1, 1)
        columns = {"loss_mask": torch.ones(1, 1), "generator_logprobs": row.detach()}
        columns["advantages"] = (teacher[token] - row).detach()
        value, _ = loss({"logprobs": row}, columns, norm={"tokens": 1.0, "sequences": 1.0})
        total = total + student[token].detach().exp() * value
    torch.testing.assert_close(torch.autograd.grad(total, logits)[0], expected)


# -------------------------------------------------------------------------------------------------------------- offline


def test_precomputed_is_what_the_teacher_says_and_is_found_again(
    offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To rounding, for it computes all tokens; a second run computes nothing and is the same, bit for bit."""
    one = ("policy.train_micro_batch_size=1", "max_num_steps=4")
    live = ("distillation_offline.precompute=false", "distillation_offline.cache=null")
    runs.trained(offline, *one, f"run_dir={offline.parent / 'live'}", *live)
    runs.trained(offline, *one)
    for kind in ("train", "val"):
        pairs = zip(lines(offline.parent / "run", kind), lines(offline.parent / "live", kind), strict=True)
        for kept, found in pairs:
            assert kept == {n: pytest.approx(v, rel=1e-4) if isinstance(v, float) else v for n, v in found.items()}
    run = runs.started(offline, *one, f"run_dir={offline.parent / 'again'}")
    infer = LocalEngine.infer
    asked: list[int] = []
    monkeypatch.setattr(LocalEngine, "infer", lambda self, ref, *a: (asked.append(len(ref)), infer(self, ref, *a))[1])
    loop.train(run)
    assert asked == [8], "only the student, once, to compare it with the teacher"
    assert lines(offline.parent / "again") == lines(offline.parent / "run")


def test_a_student_trained_offline_comes_near(offline: Path) -> None:
    options = ("policy.optimizer.lr=0.03", "policy.scheduler.name=constant", "max_num_steps=40", *UNSAVED)
    runs.trained(offline, *options)
    found = lines(offline.parent / "run")
    assert found[-1]["loss"] < 0.4 * found[0]["loss"]
    gaps = [line["teacher_kept_mass"] - line["kept_mass"] for line in (found[0], found[-1])]
    assert gaps[1] < 0.6 * gaps[0]


# ----------------------------------------------------------------------------------------------------- checks, refusals


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "far less likely" in record.getMessage()]


@pytest.mark.parametrize("case", ["distillation", "distillation-offline"])
def test_a_teacher_that_reads_nonsense_is_warned_about(
    tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Very sure of other tokens; the warning shows the text, special tokens and all. One that is not far off is not."""
    file, section = runs.write_project(tmp_path, case=case), case.replace("-", "_")
    options = ("max_num_steps=1", *UNSAVED)
    runs.trained(file, *options)
    assert not warned(caplog)
    runs.write_model(tmp_path / "wild", file, seed=4, initializer_range=1.0)
    wild = f"{section}.teachers=[{{model: {tmp_path / 'wild'}}}]"
    runs.trained(file, *options, f"run_dir={tmp_path / 'other'}", wild)
    (message,) = warned(caplog)
    assert "wild finds completions of the data far less likely than the student does (perplexity" in message
    assert "<|user|>" in message
    assert "<|assistant|>" in message


def test_perplexities_beyond_all_numbers_are_warned_about(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At a temperature near 0 even the student finds the data impossible."""
    runs.trained(file, "max_num_steps=1", *UNSAVED, "distillation.temperature=1e-5")
    (message,) = warned(caplog)
    assert "(perplexity 1.01e+304, the student's 1.01e+304)" in message


@pytest.mark.parametrize("options", [(WHOLE,), ("distillation.top_k=2",), (WHOLE, "distillation.loss=reward")], ids=str)
def test_a_teacher_whose_logits_are_nan_names_the_row(file: Path, options: tuple[str, ...]) -> None:
    run = runs.started(file, *options, *UNSAVED)
    teacher: Any = run.kit.engines["teacher"]
    with torch.no_grad():
        teacher.model.get_output_embeddings().weight[3] = math.nan
    with pytest.raises(NonFiniteError, match=r"teacher_1 puts out \S+ that are not all finite for row answer_d0_g0"):
        loop.train(run)
    assert run.clock.step == 0


def test_nan_while_all_rows_are_computed_names_the_row(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    infer = LocalEngine.infer

    def broken(self: LocalEngine, ref: BatchRef, head: Any, into: Any) -> BatchRef:
        ref = infer(self, ref, head, into)
        if "topk_logprobs" in into and len(ref) == 20:
            column: Any = self._plane.get(ref, [into["topk_logprobs"]])[into["topk_logprobs"]]
            column[7][2, 1] = math.nan
        return ref

    monkeypatch.setattr(LocalEngine, "infer", broken)
    with pytest.raises(NonFiniteError, match="topk_logprobs are not all finite in sequence 7 of the data set"):
        runs.started(offline)


def test_another_tokenizer_is_refused_though_it_has_as_many_tokens(file: Path) -> None:
    """G2: by the maps, never by the size."""
    folder = file.parent / "teacher_1"
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert len(AutoTokenizer.from_pretrained(folder)) == len(AutoTokenizer.from_pretrained(file.parent / "tokenizer"))
    with pytest.raises(ModelError, match=r"its tokenizer is not the policy's: '1' is \d+ here and \d+ there"):
        runs.started(file, "data.train.path=nowhere.jsonl")


def test_a_teacher_that_reads_less_than_a_row_is_refused(file: Path) -> None:
    runs.write_model(file.parent / "short", file, seed=1, max_position_embeddings=32)
    config = json.loads((file.parent / "short/config.json").read_text())
    (file.parent / "short/config.json").write_text(json.dumps({**config, "max_position_embeddings": 16}))
    with pytest.raises(ModelError, match=r"max_total_sequence_length is 32 but \S+short reads at most 16 tokens"):
        runs.started(
            file, f"distillation.teachers=[{{model: {file.parent / 'short'}}}]", "data.train.path=nowhere.jsonl"
        )


def test_k_beyond_the_vocabulary_is_refused(file: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"distillation.top_k: expected at most 19, .*teacher_1's tokenizer, found 20"
    ):
        runs.started(file, "distillation.top_k=20")


ON, OFF = "distillation", "distillation_offline"


@pytest.mark.parametrize(
    ("case", "overrides", "words"),
    [
        (ON, ("distillation.teachers=[]",), "distillation.teachers"),
        (ON, ("distillation.beta=0.5",), "beta: reverse_kl ignores it"),
        (ON, (WHOLE, "distillation.tail=cell"), "tail: the whole vocabulary has none"),
        (ON, ("distillation.loss=reward",), "leave divergence, beta, top_k, tail and temperature out"),
        (ON, (WHOLE, "distillation.loss=reward", "distillation.student_fraction=0.5"), "expected student_fraction: 1"),
        (ON, (WHOLE, "distillation.loss=reward", "generation.top_k=5"), "needs the student's own samples"),
        (ON, ("distillation.dynamic_sampling=true", "distillation.num_generations_per_prompt=2"), "rewards: expected"),
        (
            ON,
            ("distillation.num_generations_per_prompt=2", "distillation.student_fraction=0.5"),
            "the data set has one answer to a prompt.* expected 1, or others: teacher",
        ),
        (OFF, ("distillation_offline.top_k=null",), "precompute keeps the teacher's likeliest tokens"),
        (OFF, ("distillation_offline.precompute=false",), "cache: nothing is kept without precompute"),
    ],
)
def test_options_that_do_not_go_together(tmp_path: Path, case: str, overrides: tuple[str, ...], words: str) -> None:
    file = runs.write_project(tmp_path, case=case.replace("_", "-"))
    with pytest.raises(ConfigError, match=words):
        runs.config_of(file, *overrides)


def test_a_teacher_moves_with_the_configuration(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that is relative to where the run was started is found on a resume from elsewhere."""
    monkeypatch.chdir(file.parent)
    relative: Callable[..., Any] = lambda *more: ("distillation.teachers=[{model: teacher_1}]", *more)  # noqa: E731
    runs.trained(file, *relative("max_num_steps=2"))
    monkeypatch.chdir("/")
    assert loop.train(runs.resumed(file.parent / "run", "max_num_steps=4")).steps == 2
