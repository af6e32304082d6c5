"""Rows of prompts: what the model is given, what the rewards get, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from surefoot.config import DataConfig, DatasetConfig
from surefoot.data.encode import Encoder
from surefoot.data.prepare import Dataset, prepare
from surefoot.data.prompts import PromptChecker
from surefoot.data.rows import BadRow, Prompt
from surefoot.errors import DataError
from tests.helpers import tokenizers as tiny

USER, ANSWER = {"role": "user", "content": "2 + 3"}, {"role": "assistant", "content": "5"}


def load(folder: Path, rows: list[Any], tokenizer: Any = None, max_length: int = 64, **options: Any) -> Dataset:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {key: options.pop(key) for key in list(options) if key in DataConfig.model_fields}
    source = DatasetConfig(path=str(path), **options)
    return prepare(source, DataConfig(train=source, **data), tokenizer or tiny.byte_level(), max_length, rows="prompts")


def refused(row: Any) -> BadRow:
    found = PromptChecker({}, as_chat=True).check("f:1", row)
    assert isinstance(found, BadRow), found
    return found


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2 + 3", "answer": "5"},
        {"prompt": [USER], "answer": "5"},
        {"messages": [USER], "answer": "5"},
        {"messages": [USER, ANSWER]},
        {"messages": [USER, {**ANSWER, "content": "7"}], "answer": "5"},
    ],
)
def test_every_kind_is_rendered_with_the_generation_prompt(tmp_path: Path, row: dict[str, Any]) -> None:
    tokenizer = tiny.byte_level()
    dataset = load(tmp_path, [row], tokenizer)
    given = tokenizer.apply_chat_template([USER], add_generation_prompt=True).input_ids
    assert dataset.ids(0).tolist() == given
    (prompt,) = dataset.prompts
    assert prompt.columns == {"answer": "5"}
    assert prompt.messages == [USER]
    assert prompt.given == row.get("prompt", [USER])
    assert not dataset.trained.any()
    assert f"1 of 1 rows, {len(given)} tokens, all of prompts" in dataset.description


def test_other_columns_are_kept_and_names_are_mapped(tmp_path: Path) -> None:
    row = {"question": "a", "solution": 4, "level": {"of": ["x", None]}, "completion": "c"}
    (prompt,) = load(tmp_path, [row], columns={"prompt": "question", "answer": "solution"}).prompts
    assert prompt.columns == {"level": {"of": ["x", None]}, "completion": "c", "answer": 4}


def test_a_name_that_no_row_has_is_an_error(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(DataError, match=r"columns names 'solution' for 'answer', and none of 2 rows has such a key"):
        load(tmp_path, [{"messages": chat}] * 2, columns={"answer": "solution"})
    some = load(tmp_path, [{"prompt": "a"}, {"prompt": "b", "solution": "c"}], columns={"answer": "solution"})
    assert [prompt.columns for prompt in some.prompts] == [{}, {"answer": "c"}]


def test_a_plain_text_stands_as_it_is(tmp_path: Path) -> None:
    for tokenizer in (tiny.byte_level(adds_bos=True), tiny.byte_level()):
        dataset = load(tmp_path, [{"prompt": "2 + 3 = "}], tokenizer, prompt_format="plain")
        assert dataset.ids(0).tolist() == tokenizer("2 + 3 = ").input_ids
        assert dataset.prompts[0].messages is None


def test_the_system_prompt_is_part_of_the_chat_that_environments_go_on_with(tmp_path: Path) -> None:
    tokenizer = tiny.byte_level()
    dataset = load(tmp_path, [{"prompt": "hi"}], tokenizer, system_prompt="be kind")
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    assert dataset.prompts[0].messages == messages
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True).input_ids == dataset.ids(0).tolist()


def test_prompts_without_room_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "x " * 200}, {"prompt": "hi"}]
    dataset = load(tmp_path, rows)
    assert dataset.row_index.tolist() == [1]
    assert "1 × prompt of more than 64 tokens, the room that generation.max_new_tokens leaves dropped" in (
        dataset.description
    )
    with pytest.raises(DataError, match="none of its 1 rows can be trained on: 1 × prompt of more than 64 tokens"):
        load(tmp_path, rows[:1])


@pytest.mark.parametrize(
    ("template", "header"),
    [(tiny.CHATML_NO_PROMPT, "<|im_start|>assistant\n"), (tiny.BRACKETS.partition("{% if add_gen")[0], "[A]")],
)
def test_a_template_without_a_generation_prompt_writes_the_header_itself(
    tmp_path: Path, template: str, header: str
) -> None:
    """What a model that was trained on such chats goes on from."""
    tokenizer = tiny.byte_level(chat_template=template)
    ids = load(tmp_path, [{"prompt": "hi"}], tokenizer).ids(0).tolist()
    bare = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert tokenizer.decode(ids) == bare + header
    data = DataConfig(train=DatasetConfig(path="x"))
    row = PromptChecker({}, as_chat=True).check("f:1", {"prompt": "hi"})
    assert isinstance(row, Prompt)
    trained = Encoder(tokenizer, data, 99).prompt_ids([{"role": "user", "content": "hi"}])
    assert trained == ids


def test_a_template_that_cannot_lead_up_to_an_answer_is_refused(tmp_path: Path) -> None:
    backwards = "{% for m in messages | reverse %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(DataError, match="the chat template adds none, and writes the turns before an answer different"):
        load(tmp_path, [{"prompt": "hi"}], tiny.byte_level(chat_template=backwards))
    users_only = "{{ messages[0]['content'] }}{% if messages[1:] %}{{ raise_exception('one turn') }}{% endif %}"
    with pytest.raises(DataError, match=r"the chat template adds none, and the chat template refuses .*one turn"):
        load(tmp_path, [{"prompt": "hi"}], tiny.byte_level(chat_template=users_only))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "a"}, r"expected `prompt` or `messages`, found the keys 'question'; `columns: {prompt: their_"),
        ({"prompt": 3}, r"field 'prompt': expected a string or a list of messages, found number 3"),
        ({"prompt": ""}, "expected text, found an empty string"),
        ({"prompt": [USER, ANSWER]}, "expected a chat to answer, found an assistant turn at its end"),
        ({"messages": [ANSWER]}, "expected a chat to answer, found nothing in front of the answer"),
        ({"messages": []}, "expected at least one message"),
        ({"prompt": "a", "completions": 1}, "'completions': rewards are given the sampled completions by this name"),
        ({"prompt": "a", "answer": float("nan")}, "field 'answer': expected plain JSON values"),
        ({"prompt": "a", "when": object()}, "field 'when': expected plain JSON values"),
        ("text", "expected an object with `prompt` or `messages`, found string 'text'"),
    ],
)
def test_what_is_no_prompt_is_refused(row: Any, words: str) -> None:
    assert re.search(words, refused(row).detail), refused(row).detail


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the file is empty"):
        load(tmp_path, [])


def test_the_fingerprint_is_of_prompts_and_of_what_rewards_are_given(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    found = [
        load(tmp_path, rows).fingerprint,
        load(tmp_path, [{**rows[0], "answer": "3"}, rows[1]]).fingerprint,
        load(tmp_path, [{**rows[0], "prompt": "c"}, rows[1]]).fingerprint,
        load(tmp_path, rows, num_workers=2).fingerprint,
    ]
    assert found[3] == found[0]
    assert len(set(found)) == 3


def test_what_ends_a_turn() -> None:
    data = DataConfig(train=DatasetConfig(path="x"))

    def ends(tokenizer: Any) -> list[str]:
        return [tokenizer.convert_ids_to_tokens(i) for i in Encoder(tokenizer, data, 9).stop_ids()]

    assert ends(tiny.byte_level()) == ["<|im_end|>"]
    assert ends(tiny.byte_level(eos="<s>")) == ["<s>", "<|im_end|>"]
    assert ends(tiny.byte_level(chat_template=tiny.BRACKETS)) == ["<|im_end|>"], "an ordinary text ends no turn"
