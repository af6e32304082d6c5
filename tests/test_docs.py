"""Every command in a `console` block of the docs, and of the README's "Your own run", runs as written."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from surefoot import cli

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(), flags=re.DOTALL)
    if page.name == "README.md":
        section = page.read_text().partition("## Your own run")[2]
        blocks = re.findall(r"```\n(.*?)```", section, flags=re.DOTALL)[:1]
    lines = [line.removeprefix("$ ").strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def run(command: str, monkeypatch: pytest.MonkeyPatch) -> int:
    program, *arguments = shlex.split(command, comments=True)
    assert program == "surefoot", command
    monkeypatch.setattr(sys, "argv", ["surefoot", *arguments])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def run_all(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "examples", folder / "examples")
    monkeypatch.chdir(folder)
    for command in commands(page):
        assert run(command, monkeypatch) == 0, command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_run_as_written(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_all(page, tmp_path, monkeypatch)
    if page.name == "rewards.md":
        lines = map(json.loads, (tmp_path / "runs/calculator/metrics.jsonl").read_text().splitlines())
        before, *_, after = (line["heldout/reward"] for line in lines if "heldout/reward" in line)
        assert before < 0.5 and after > 0.8


def test_the_readmes_commands_run_and_its_models_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_all(ROOT / "README.md", tmp_path, monkeypatch)
    for name, metric in (("rm", "heldout/accuracy"), ("dpo", "heldout/rewards/accuracies")):
        lines = map(json.loads, (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines())
        before, *_, after = (line[metric] for line in lines if metric in line)
        assert before < 0.65, name
        assert after >= 0.85, name


@pytest.mark.parametrize("example", ["additions", "calculator"])
def test_the_examples_data_are_what_their_script_makes(example: str) -> None:
    made = runpy.run_path(str(ROOT / "examples" / example / "make.py"))["files"]()
    assert {name: (ROOT / "examples" / example / name).read_text() for name in made} == made


def test_the_examples_script_trains_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, folder = tmp_path / "rows.jsonl", tmp_path / "tokenizer"
    rows = [{"question": f"How many are {n} naïve cats?", "answer": f"{n} cats\n#### {n}"} for n in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    script = str(ROOT / "examples" / "train_tokenizer.py")
    given = f"{file} {folder} --columns question answer --size 300"
    monkeypatch.setattr(sys, "argv", [script, *given.split()])
    runpy.run_path(script, run_name="__main__")
    made = AutoTokenizer.from_pretrained(folder)
    assert len(made) == 300 and made.decode(made.encode("日本 cats")) == "日本 cats"
    chat = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "2 cats"}]
    told = made.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    trained = [i for i, own in zip(told["input_ids"], told["assistant_masks"], strict=True) if own]
    assert made.decode(trained) == "2 cats<|end|>" and trained[-1] == made.eos_token_id


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_reference_is_that_of_the_code() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import reference
    finally:
        sys.path.remove(str(ROOT / "tools"))
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == reference.page(), "run tools/reference.py"


def test_every_phase_of_a_run_is_explained() -> None:
    code = "".join(path.read_text() for path in (ROOT / "surefoot").rglob("*.py"))
    phases = {name for call in re.findall(r"with .*\bphase\((.*)\):", code) for name in re.findall(r'"(.+?)"', call)}
    table = (ROOT / "docs" / "sft.md").read_text().partition("## Where the time goes")[2].partition("## ")[0]
    assert set(re.findall(r"^\| `(.+?)` \|", table, flags=re.MULTILINE)) == {*phases, "other"}
