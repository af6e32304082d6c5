"""Cross-tokenizer distillation as whole tiny runs: what it says and refuses at its start, and what it learns."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from surefoot import loop
from surefoot.algorithms import _cross_reader
from surefoot.errors import ConfigError, ModelError, NonFiniteError, ResumeRefused
from tests.helpers import runs
from tests.helpers.tokenizers import byte_level, words

QUIET = ("checkpointing.enabled=false", "val_period=0")


def project(folder: Path, case: str = "cross_tokenizer", **section: Any) -> Path:
    file = runs.write_project(folder, case=case)
    values = json.dumps({**runs.config_of(file).model_dump()["cross_tokenizer"], **section}, ensure_ascii=False)
    text = runs.yaml.safe_load(file.read_text())
    text["cross_tokenizer"] = json.loads(values)
    file.write_text(runs.yaml.safe_dump(text, sort_keys=False))
    return file


def teacher(folder: Path, name: str = "teacher_1", **settings: Any) -> list[dict[str, Any]]:
    return [{"model": str(folder / name), **settings}]


def first_step(file: Path, *overrides: str) -> dict[str, Any]:
    runs.trained(file, "max_num_steps=1", *QUIET, *overrides)
    return runs.metric_lines(file.parent / "run")[0]


def digits() -> PreTrainedTokenizerFast:
    """Every other character is unknown."""
    names = ["<unk>", "<s>", "</s>", *"0123456789+="]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    made.chat_template = template
    return made


# ------------------------------------------------------------------------------------------------------- at the start


def test_the_start_says_how_well_the_tokenizers_go_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of the student's 19 tokens, 13 are bytes of the teacher's too: ten digits, + and =, and the end of a turn."""
    with caplog.at_level(logging.INFO, "surefoot"):
        runs.started(project(tmp_path), *QUIET)
    (line,) = [record.getMessage() for record in caplog.records if "another tokenizer" in record.getMessage()]
    assert "byte-identical are 68.4 % of the student's 19 tokens" in line
    assert "on 20 texts of the data" in line and "0 texts cannot be aligned" in line


def test_a_teacher_with_the_students_tokenizer_takes_the_exact_path(tmp_path: Path) -> None:
    run = runs.started(project(tmp_path, teachers=teacher(tmp_path), top_k=3), *QUIET)
    assert run.algorithm._teachers._readers["teacher"].retokenize is None  # type: ignore[attr-defined]


def other_teacher(file: Path, tokenizer: Any, name: str = "odd") -> str:
    folder = file.parent / name
    tokenizer.save_pretrained(folder / "tokenizer")
    runs.write_model(folder, file, seed=5, tokenizer=folder / "tokenizer")
    return str(folder)


def test_tokenizers_that_cannot_be_aligned_are_refused(tmp_path: Path) -> None:
    """Every answer is a word that it does not know."""
    file = project(tmp_path)
    model = other_teacher(file, words(["hello"]))
    with pytest.raises(ModelError, match=r"cannot be aligned.*20 texts .* 0 are not given back .* 20 by the teacher"):
        runs.started(project(tmp_path, teachers=[{"model": model}], top_k=3), *QUIET)


def test_a_chat_without_the_teachers_template_is_refused(tmp_path: Path) -> None:
    file = project(tmp_path)
    model = other_teacher(file, byte_level(chat_template=None))
    with pytest.raises(ModelError, match="no chat template"):
        runs.started(project(tmp_path, teachers=[{"model": model}], top_k=3), *QUIET)


def test_k_larger_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"cross_tokenizer.top_k: expected at most 19, .*teacher_1's tokenizer, found 20"
    ):
        runs.started(project(tmp_path, teachers=teacher(tmp_path), top_k=20), *QUIET)


def test_a_teacher_that_cannot_read_that_far_is_refused(tmp_path: Path) -> None:
    far = teacher(tmp_path, "other", max_total_sequence_length=100_000)
    with pytest.raises(ModelError, match="reads at most"):
        runs.started(project(tmp_path, teachers=far), *QUIET)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"beta": 0.5}, "beta: forward_kl ignores it"),
        ({"loss": "projection", "token_merge": "observed"}, "token_merge: read by loss: gold alone"),
        ({"matched_weight": 1.0}, "both matched_weight and unmatched_weight"),
        ({"ce_dynamic": True}, "ce_dynamic needs a ce_weight"),
        ({"student_fraction": 0.5, "num_generations_per_prompt": 2}, "one answer to a prompt"),
        ({"teachers": []}, "teachers"),
        ({"top_k": 0}, "top_k"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, section: dict[str, Any], message: str) -> None:
    file = runs.write_project(tmp_path, case="cross_tokenizer")
    overrides = [f"cross_tokenizer.{key}={json.dumps(value)}" for key, value in section.items()]
    with pytest.raises(ConfigError, match=message):
        runs.config_of(file, *overrides)


def test_a_data_set_cannot_answer_an_environment(tmp_path: Path) -> None:
    file = runs.write_project(tmp_path, case="cross_tokenizer")
    with pytest.raises(ConfigError, match=r"student_fraction: an environment replies .* expected 1"):
        runs.config_of(file, "environment.name=guessing", "cross_tokenizer.student_fraction=0.5")


# --------------------------------------------------------------------------------------------------- what it computes


@pytest.mark.parametrize("loss", ["gold", "projection"])
@pytest.mark.parametrize("fraction", [0, 1])
@pytest.mark.parametrize(("top_k", "path"), [(3, "same"), (None, "same"), (3, "cross"), (None, "cross")])
def test_a_teacher_that_is_the_student_teaches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str, fraction: int, top_k: int | None, path: str
) -> None:
    """By the exact path and, made to believe that the tokenizers differ, by tokenizing anew. In the sampled texts of a
    student without training are special tokens, which no text leads to: rows with these are not looked at there."""
    if path == "cross":
        monkeypatch.setattr(_cross_reader, "has_same_tokenizer", lambda *_: False)
        if fraction:
            return
    file = project(
        tmp_path, teachers=teacher(tmp_path), top_k=top_k, loss=loss, student_fraction=fraction, divergence="jsd"
    )
    line = first_step(file, f"policy.model_name={json.dumps(str(tmp_path / 'teacher_1'))}", "policy.model_init=null")
    assert line["dropped_rows/teacher"] == 0 and line["one_to_one/teacher"] == 1
    assert line["distillation"] == pytest.approx(0.0, abs=1e-6)
    assert line["grad_norm"] < 1e-4


def test_rows_that_cannot_be_aligned_are_dropped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A student that samples at random says its special tokens too; the teacher knows digits and signs alone."""
    file = project(tmp_path)
    model = other_teacher(file, digits())
    line = first_step(project(tmp_path, teachers=[{"model": model}], top_k=5))
    assert line["dropped_rows/teacher"] > 0
    assert line["skipped_rows"] == line["dropped_rows/teacher"]
    told = [r.getMessage() for r in caplog.records if "dropped for this teacher" in r.getMessage()]
    assert len(told) == 1 and "the teacher's tokenizer does not give back" in told[0]


def test_a_step_without_a_row_that_a_teacher_can_read_trains_nothing(tmp_path: Path) -> None:
    file = project(tmp_path, teachers=teacher(tmp_path, "other", max_total_sequence_length=12))
    with (tmp_path / "train.jsonl").open("a") as data:  # the last row it can read
        data.write('{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "1"}]}\n')
    line = first_step(file, "data.shuffle=false")
    assert line["dropped_rows/teacher"] == line["skipped_rows"] == 4
    assert line["distillation"] == line["grad_norm"] == 0 and line["skipped_optimizer_steps"] == 1


def test_teachers_teach_rows_of_their_sources(tmp_path: Path) -> None:
    both = [*teacher(tmp_path, "other", sources=["a"]), *teacher(tmp_path, "teacher_2", sources=["b"])]
    file = project(tmp_path, teachers=both, student_fraction=0, top_k=3)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    lines = [json.dumps({**row, "source": "ab"[i % 2]}) + "\n" for i, row in enumerate(rows)]
    (tmp_path / "train.jsonl").write_text("".join(lines))
    run = runs.started(file, *QUIET)
    ref = run.source.take(run.clock, lambda: None)
    assert ref is not None
    ref = run.algorithm.enrich(ref, run.kit)
    columns: Any = run.kit.plane.get(ref, ["source", "teacher_1/chunk", "teacher_2/chunk"])
    assert set(columns["source"]) == {"a", "b"}
    for source, first, second in zip(*columns.values(), strict=True):
        assert (bool(first.any()), bool(second.any())) == (source == "a", source == "b")
    run.source.close()


def test_the_best_teacher_of_a_row_is_the_one_that_finds_it_likeliest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One teacher is certain of what is not in the data, which is warned about; the rows are the other's."""
    file = project(tmp_path)
    sure = tmp_path / "sure"
    shutil.copytree(tmp_path / "teacher_1", sure)
    weights = load_file(sure / "model.safetensors")
    weights["lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"] *= 50
    save_file(weights, sure / "model.safetensors", {"format": "pt"})
    both = [*teacher(tmp_path, "sure"), *teacher(tmp_path, "teacher_2")]
    file = project(tmp_path, teachers=both, teacher_choice="best", student_fraction=0, top_k=3)
    run = runs.started(file, *QUIET)
    ref = run.source.take(run.clock, lambda: None)
    assert ref is not None
    run.algorithm.enrich(ref, run.kit)
    (warned,) = [r.getMessage() for r in caplog.records if "far less likely" in r.getMessage()]
    assert "/sure finds completions" in warned and "It saw '<|bos|><|user|>" in warned
    columns: Any = run.kit.plane.get(ref, ["teacher_1/weight", "teacher_2/weight", "teacher_2/chunk", "loss_mask"])
    assert [columns[f"teacher_{i}/weight"].tolist() for i in (1, 2)] == [[0] * 4, [1] * 4]
    for chunk, mask in zip(columns["teacher_2/chunk"], columns["loss_mask"], strict=True):
        assert chunk[mask != 0].tolist() == list(range(1, int(mask.sum()) + 1))
    run.source.close()


def test_a_teacher_that_puts_out_nan_is_named(tmp_path: Path) -> None:
    run = runs.started(project(tmp_path), *QUIET)
    model = run.kit.engines["teacher"].model  # type: ignore[attr-defined]
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match=r"the teacher .*other puts out .* not all finite for row \w+_d0"):
        loop.train(run)


def test_the_dynamic_weight_follows_the_last_step_and_is_resumed(tmp_path: Path) -> None:
    file = project(tmp_path, "cross_tokenizer-offline")
    runs.trained(file, "max_num_steps=2", "val_period=0")
    first, second = runs.metric_lines(tmp_path / "run")[:2]
    scale = first["distillation"] / first["nll"]
    assert second["loss"] == pytest.approx(second["distillation"] + 0.5 * scale * second["nll"], rel=1e-5)
    saved = json.loads((tmp_path / "run/checkpoints/step_2/algorithm/cross_tokenizer.json").read_text())
    assert saved["ce_scale"] == pytest.approx(second["distillation"] / second["nll"])


def test_a_resume_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    file = project(tmp_path)
    runs.trained(file, "max_num_steps=2", "val_period=0")
    tokenizer = tmp_path / "other" / "tokenizer.json"
    text = tokenizer.read_text()
    assert '"Ġuser"' not in text
    tokenizer.write_text(text.replace('"use_regex": false', '"use_regex": true', 1))
    with pytest.raises(ResumeRefused, match=r"the tokenizer of the teacher .*other is not the one"):
        runs.resumed(tmp_path / "run", "max_num_steps=4")


def test_a_teacher_that_can_read_no_prompt_is_refused(tmp_path: Path) -> None:
    file = project(tmp_path)
    short = f"cross_tokenizer.teachers=[{{model: {tmp_path / 'other'}, max_total_sequence_length: 3}}]"
    with pytest.raises(
        ModelError, match=r"other can read none of the first 20 prompts of the data: the prompt has \d+"
    ):
        runs.started(file, short, *QUIET)


def test_a_resume_with_another_chat_template_is_refused(tmp_path: Path) -> None:
    file = project(tmp_path)
    runs.trained(file, "max_num_steps=2", "val_period=0")
    template = tmp_path / "other" / "chat_template.jinja"
    template.write_text("Answer: " + template.read_text())
    with pytest.raises(ResumeRefused, match=r"the chat template of the teacher .*other is not the one"):
        runs.resumed(tmp_path / "run", "max_num_steps=4")


def test_the_map_between_the_vocabularies_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = project(tmp_path)
    runs.started(file, *QUIET).source.close()
    assert [path.name for path in (tmp_path / "cache").glob("*/map*")]
    monkeypatch.setattr("surefoot.algorithms._cross_reader.map_vocabulary", None)  # not called again
    runs.started(file, f"run_dir={tmp_path / 'again'}", *QUIET).source.close()


def test_turns_of_a_conversation_are_each_aligned_with_the_teachers(tmp_path: Path) -> None:
    """Two turns, each ended by a digit or by the token that ends turns. Around them the teacher's row has its own
    template, and its distributions are those of its model; nothing is learned of what the environment said."""
    twice = "environment={name: tests.rollout.environment_samples.AsksTwice, max_turns: 2}"
    stops = "generation.stop=['1', '2', '3', '4', '5', '6', '7', '8', '9', '0']"
    sizes = ("policy.max_total_sequence_length=60", "policy.model_init.max_position_embeddings=200")
    file = project(tmp_path, top_k=5)
    runs.write_model(tmp_path / "far", file, seed=3, tokenizer=tmp_path / "pieces", max_position_embeddings=200)
    far = {"model": str(tmp_path / "far"), "max_total_sequence_length": 200}
    given = f"cross_tokenizer.teachers=[{json.dumps(far)}]"
    run = runs.started(file, twice, stops, given, *sizes, "generation.max_new_tokens=12", *QUIET)
    loop._publish(run)
    ref = run.source.take(run.clock, lambda: None)
    assert ref is not None
    ref = run.algorithm.enrich(ref, run.kit)
    names = ["input_ids", "loss_mask", *(f"teacher/{n}" for n in ("input_ids", "mask", "chunk", "topk_logprobs"))]
    columns: Any = run.kit.plane.get(ref, names)
    model: Any = run.kit.engines["teacher"].model  # type: ignore[attr-defined]
    own, other = run.kit.tokenizer, run.kit.tokenizers["teacher"]
    several = 0
    for ids, mask, read, read_mask, chunk, topk in zip(*columns.values(), strict=True):
        ours, theirs = turns(mask), turns(read_mask)
        texts = [own.decode(ids[turn].tolist()).replace("<|end|>", "<|im_end|>") for turn in ours]
        assert [other.decode(read[turn].tolist()) for turn in theirs] == texts
        assert not chunk[mask == 0].any() and not topk[mask == 0].any()
        assert chunk[mask != 0].unique_consecutive().tolist() == list(range(1, int(chunk.max()) + 1))
        if len(ours) == 2:
            several += 1
            assert chunk[ours[1][0]] == chunk[ours[0][-1]] + 1
            between = other.decode(read[theirs[0][-1] + 1 : theirs[1][0]].tolist())
            end = "" if texts[0].endswith("<|im_end|>") else "<|im_end|>"
            assert between == f"{end}\n<|im_start|>user\n12+34=<|im_end|>\n<|im_start|>assistant\n"
            with torch.no_grad():
                said = model(read[None]).logits[0].log_softmax(-1)
            # But for a factor: the probabilities of the chunk's other tokens.
            expected, found = said[theirs[1][0] - 1].topk(5).values, topk[ours[1][0]]
            torch.testing.assert_close(
                found - found[0], expected - expected[0], rtol=1e-4, atol=1e-4
            )  # but for a factor
    assert several >= 2
    (objective,) = run.algorithm.objectives(run.clock)
    trained = run.kit.engines["policy"].train(ref, objective)
    assert trained["num_tokens"].value == sum(int(mask.sum()) for mask in columns["loss_mask"])
    assert trained["distillation"].value != 0 and trained["grad_norm"].value > 0
    run.source.close()


def turns(mask: torch.Tensor) -> list[list[int]]:
    """Places of each run of the student's own tokens."""
    found: list[list[int]] = []
    for place in mask.nonzero()[:, 0].tolist():
        if not found or found[-1][-1] != place - 1:
            found.append([])
        found[-1].append(place)
    return found


def test_it_learns_what_a_teacher_with_another_tokenizer_says(tmp_path: Path) -> None:
    """The teacher has random weights; what it says of the student's tokens is far from the student at first."""
    file = project(tmp_path, student_fraction=0, loss="projection", top_k=None)
    options = ("policy.scheduler.name=constant", "policy.optimizer.lr=0.03", "data.train.max_rows=4", *QUIET)
    runs.trained(file, "max_num_steps=15", *options)
    losses = [line["distillation"] for line in runs.metric_lines(tmp_path / "run")]
    assert 0 <= losses[-1] < 0.5 * losses[0]
