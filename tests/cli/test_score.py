"""`surefoot score`: the scores of validation and of Transformers by hand, for every kind of row; what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

from surefoot.cli import app
from surefoot.demo import task
from surefoot.errors import CorruptCheckpoint, DataError, ModelError, NonFiniteError, SurefootError
from tests.helpers import runs

STEP = "run/checkpoints/step_2"
WEIGHTS = f"{STEP}/policy/weights"
PROMPT = {"role": "user", "content": "12+34="}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a reward model of two steps, measured at its end, by rows that begin with a system turn."""
    folder = tmp_path_factory.mktemp("rm")
    runs.trained(runs.write_project(folder, case="rm"), "max_num_steps=2", "data.system_prompt='1+1'")
    return folder


@pytest.fixture
def project(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(trained, tmp_path / "project"))


def score(*arguments: Any) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["score", *map(str, arguments), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def refused(kind: type[SurefootError], *arguments: Any) -> str:
    with pytest.raises(kind) as caught:
        score(*arguments)
    return str(caught.value)


def write(file: Path, *rows: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def by_hand(folder: Path, chat: list[dict[str, str]]) -> float:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)["input_ids"]
    with torch.no_grad():
        return float(AutoModelForSequenceClassification.from_pretrained(folder)(ids).logits[0, 0])


def change_weight(folder: Path, name: str, value: float) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, name: torch.full_like(weights[name], value)}, folder / "model.safetensors", {"format": "pt"})


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


# ---------------------------------------------------------------------------------------------------------- scores


def test_scores_are_those_of_validation_and_of_transformers(trained: Path, tmp_path: Path) -> None:
    found = score(trained / STEP, trained / "heldout.jsonl", "--out", tmp_path / "scores.jsonl")
    measured = next(line for line in runs.metric_lines(trained / "run") if "heldout/margin" in line)
    for name in ("accuracy", "margin", "scores/chosen", "scores/rejected"):
        assert found[name] == pytest.approx(measured[f"heldout/{name}"], abs=1e-6), name
    assert (found["pairs"], found["ties"], found["truncated"], found["dropped"]) == (3, 0, 0, {})
    rows = lines(trained / "heldout.jsonl")
    scored = lines(tmp_path / "scores.jsonl")
    assert [line["row"] for line in scored] == [0, 1, 2]
    for row, line in zip(rows, scored, strict=True):
        for side in ("chosen", "rejected"):
            chat = [{"role": "system", "content": "1+1"}, *row["prompt"], *row[side]]
            assert line[side] == pytest.approx(by_hand(trained / WEIGHTS, chat), abs=1e-6)


def test_a_plain_folder_knows_nothing_of_the_run(trained: Path) -> None:
    """Not its system turn, unless that is said; and micro-batches change nothing but rounding."""
    step, plain = (score(trained / part, trained / "heldout.jsonl") for part in (STEP, WEIGHTS))
    said = score(trained / WEIGHTS, trained / "heldout.jsonl", "--system-prompt", "1+1", "--batch-size", 1)
    assert plain["margin"] != pytest.approx(step["margin"], abs=1e-6)
    assert said["margin"] == pytest.approx(step["margin"], abs=1e-6)
    half = score(trained / STEP, trained / "heldout.jsonl", "--precision", "bfloat16")
    assert half["scores/chosen"] == pytest.approx(step["scores/chosen"], abs=0.05)
    assert half["scores/chosen"] != step["scores/chosen"]


def test_an_adapter_scores_as_in_its_run(tmp_path: Path) -> None:
    file = runs.write_project(tmp_path, case="rm")
    runs.trained(file, "max_num_steps=2", "policy.lora={dim: 4, alpha: 64}")
    found = score(tmp_path / STEP, tmp_path / "heldout.jsonl")
    measured = next(line for line in runs.metric_lines(tmp_path / "run") if "heldout/margin" in line)
    for name in ("accuracy", "margin", "scores/chosen", "scores/rejected"):
        assert found[name] == pytest.approx(measured[f"heldout/{name}"], abs=1e-5), name
    said = refused(ModelError, tmp_path / WEIGHTS, tmp_path / "heldout.jsonl")
    assert "surefoot ckpt export step_N FOLDER --merge" in said
    merged = ["ckpt", "export", str(tmp_path / STEP), str(tmp_path / "merged"), "--merge"]
    assert CliRunner().invoke(app, merged).exit_code == 0
    assert score(tmp_path / "merged", tmp_path / "heldout.jsonl")["margin"] == pytest.approx(found["margin"], abs=1e-5)


def test_single_answers(trained: Path, tmp_path: Path) -> None:
    answers = [{"role": "assistant", "content": text} for text in ("46", "47")]
    chats = write(tmp_path / "chats.jsonl", *({"messages": [PROMPT, answer]} for answer in answers))
    texts = write(tmp_path / "texts.jsonl", *({"q": PROMPT["content"], "a": answer["content"]} for answer in answers))
    found = score(trained / WEIGHTS, chats, "--out", tmp_path / "scores.jsonl")
    values = [by_hand(trained / WEIGHTS, [PROMPT, answer]) for answer in answers]
    assert [line["score"] for line in lines(tmp_path / "scores.jsonl")] == pytest.approx(values, abs=1e-6)
    for name, value in (("mean", sum(values) / 2), ("min", min(values)), ("max", max(values))):
        assert found[f"score/{name}"] == pytest.approx(value, abs=1e-6)
    assert found["rows"] == 2
    named = score(trained / WEIGHTS, texts, "--columns", "prompt=q", "--columns", "completion=a")
    assert named["score/mean"] == pytest.approx(found["score/mean"], abs=1e-6)
    assert score(trained / WEIGHTS, chats, "--max-rows", 1)["score/mean"] == pytest.approx(values[0], abs=1e-6)


def test_one_score_to_a_row_where_the_template_rewrites_earlier_turns(trained: Path, tmp_path: Path) -> None:
    """Training would make two texts of such a chat; it is scored once, at its end."""
    template = (
        "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' }}"
        "{{ m.content if loop.last or m.role == 'user' else '0' }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    chat = [PROMPT, {"role": "assistant", "content": "46"}, PROMPT, {"role": "assistant", "content": "47"}]
    file = write(tmp_path / "chats.jsonl", {"messages": chat})
    found = score(trained / WEIGHTS, file, "--chat-template", template)
    seen = [PROMPT, {"role": "assistant", "content": "0"}, *chat[2:]]
    assert (found["rows"], found["score/min"]) == (1, pytest.approx(by_hand(trained / WEIGHTS, seen), abs=1e-6))


def test_ranked_answers(trained: Path, tmp_path: Path) -> None:
    completions = [{"completion": text, "rank": rank} for rank, text in enumerate(("46", "47", "9"))]
    file = write(tmp_path / "ranked.jsonl", {"context": "12+34=", "completions": completions})
    found = score(trained / WEIGHTS, file, "--ranking", "all_pairs", "--out", tmp_path / "scores.jsonl")
    scored = lines(tmp_path / "scores.jsonl")
    assert (found["pairs"], [line["row"] for line in scored]) == (3, [0, 0, 0])
    assert found["longer_wins"] == pytest.approx((0.5 + 1 + 1) / 3)
    assert score(trained / WEIGHTS, file)["pairs"] == 1


def test_longer_wins_ties_and_what_is_left_out(project: Path) -> None:
    sides = [("46", "7"), ("6", "47"), ("46", "47"), ("46", "47"), ("46", "46"), ("1" * 40 + "46", "1" * 40 + "47")]
    rows = [{"prompt": "12+34=", "chosen": chosen, "rejected": rejected} for chosen, rejected in sides]
    file = write(project / "pairs.jsonl", *rows, {"prompt": "12+34=", "chosen": 46, "rejected": "47"})
    assert "pairs.jsonl:7: field 'chosen'" in refused(DataError, project / STEP, file)
    change_weight(project / WEIGHTS, "score.weight", 0.0)
    found = score(project / WEIGHTS, file, "--skip-bad-rows", "--max-length", 32)
    assert (found["pairs"], found["ties"], found["accuracy"]) == (4, 4, 0.0)
    assert (found["longer_wins"], found["same_length"]) == (0.5, 2)
    assert found["truncated"] == 2
    assert found["dropped"] == {"both sides the same": 1, "both sides the same within 32 tokens": 1}
    assert found["skipped"] == {"wrong type in chosen": 1}


def test_it_prints_a_line_for_each_number(trained: Path) -> None:
    result = CliRunner().invoke(app, ["score", str(trained / STEP), str(trained / "heldout.jsonl")])
    assert result.exit_code == 0
    names = [line.split()[0] for line in result.stdout.splitlines()]
    assert names[2:6] == ["pairs", "accuracy", "longer_wins", "same_length"]


# ---------------------------------------------------------------------------------------------------- what is refused


def test_out_is_never_overwritten_unasked(trained: Path, tmp_path: Path) -> None:
    data = Path(shutil.copy(trained / "heldout.jsonl", tmp_path / "data.jsonl"))
    out = tmp_path / "scores.jsonl"
    out.write_text("mine")
    asked = (trained / STEP, data, "--out")
    assert "replace it with --overwrite" in refused(DataError, *asked, out)
    assert "the very file that is read" in refused(DataError, *asked, data, "--overwrite")
    assert "there is no folder" in refused(DataError, *asked, tmp_path / "no" / "scores.jsonl")
    assert out.read_text() == "mine"
    score(*asked, out, "--overwrite")
    assert len(lines(out)) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "scores.jsonl"]


def test_a_score_that_is_no_number_names_its_row(project: Path) -> None:
    change_weight(project / WEIGHTS, "score.weight", 3e38)
    asked = (project / WEIGHTS, project / "heldout.jsonl", "--out", project / "scores.jsonl")
    assert "the score of row 0, chosen" in refused(NonFiniteError, *asked)
    assert not (project / "scores.jsonl").exists()


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "found a LlamaForCausalLM"),
        ({"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}, "found one with 2 labels"),
    ],
)
def test_a_model_of_another_kind(project: Path, config: dict[str, Any], named: str) -> None:
    change_config(project / WEIGHTS, **config)
    said = refused(ModelError, project / WEIGHTS, project / "heldout.jsonl")
    assert f"{WEIGHTS} is no reward model" in said
    assert named in said


def test_a_checkpoint_of_another_kind(tmp_path: Path) -> None:
    for name, lora in (("whole", "policy.lora=null"), ("adapter", "policy.lora={dim: 2}")):
        file = runs.write_project(tmp_path / name)
        runs.trained(file, "max_num_steps=2", lora)
        assert "is no reward model" in refused(ModelError, tmp_path / name / STEP, tmp_path / name / "heldout.jsonl")


def test_a_score_head_that_is_not_in_the_file(project: Path) -> None:
    weights = load_file(project / WEIGHTS / "model.safetensors")
    save_file({n: w for n, w in weights.items() if n != "score.weight"}, project / WEIGHTS / "model.safetensors")
    assert "score head is not in its file" in refused(ModelError, project / WEIGHTS, project / "heldout.jsonl")


def test_a_file_of_weights_that_is_none(project: Path) -> None:
    (project / WEIGHTS / "model.safetensors").write_bytes(b"\xff" * 20)
    assert "model.safetensors is malformed" in refused(ModelError, project / WEIGHTS, project / "heldout.jsonl")


def test_folders_that_are_none(project: Path) -> None:
    data = project / "heldout.jsonl"
    assert "there is no folder" in refused(ModelError, project / "nowhere", data)
    said = refused(ModelError, project / "run", data)
    assert "it holds checkpoints, such as" in said
    assert STEP in said
    (project / WEIGHTS / "config.json").write_text("{")
    assert "is not a sound checkpoint" in refused(CorruptCheckpoint, project / STEP, data)
    assert "cannot be loaded" in refused(ModelError, project / WEIGHTS, data)


def test_data_that_cannot_be_scored(project: Path) -> None:
    (project / "empty.jsonl").touch()
    assert "the file is empty" in refused(DataError, project / STEP, project / "empty.jsonl")
    assert "no such file" in refused(DataError, project / STEP, project / "none.jsonl")
    (project / WEIGHTS / "chat_template.jinja").unlink()
    chats = write(project / "chats.jsonl", *task.split_rows(0, 1, 1)[0])
    assert "the tokenizer has no chat template" in refused(ModelError, project / WEIGHTS, chats)
