"""What every kind of file gives, and what is said about files and rows that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.config import DatasetConfig
from surefoot.data.datasets import read
from surefoot.data.rows import BadRow, Row, RowChecker, RowError
from surefoot.errors import ConfigError, DataError

GOOD = {"prompt": "q", "completion": "a"}


def values(path: Path, **options: Any) -> list[Any]:
    rows, _ = read(DatasetConfig(path=str(path), **options))
    return [f"{where}: {value}" if isinstance(value, RowError) else value for where, value in rows]


def check(value: Any, columns: dict[str, str] | None = None, *, as_chat: bool = True) -> Row:
    row = RowChecker(columns or {}, as_chat=as_chat).check("f:1", value)
    assert isinstance(row, Row)
    return row


def refused(value: Any, columns: dict[str, str] | None = None) -> BadRow:
    row = RowChecker(columns or {}, as_chat=True).check("f:1", value)
    assert isinstance(row, BadRow)
    return row


# --------------------------------------------------------------------------------------------------------------- files


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "completion": f"a{i}", "level": i} for i in range(3)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(tmp_path / "many")
    for name in ("a.jsonl", "a.json", "a.parquet", "one", "many"):
        assert values(tmp_path / name) == rows, name
        assert values(tmp_path / name, max_rows=2) == rows[:2], name


def test_splits_of_a_folder(tmp_path: Path) -> None:
    splits = {name: datasets.Dataset.from_list([{"text": name}]) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "d")
    assert values(tmp_path / "d", split="test") == [{"text": "test"}]
    with pytest.raises(DataError, match=r"found split: None, expected one of train, test"):
        values(tmp_path / "d")
    with pytest.raises(DataError, match=r"found split: 'dev', expected one of train, test"):
        values(tmp_path / "d", split="dev")


def test_a_missing_file_names_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.jsonl").touch()
    with pytest.raises(DataError, match=r"trian\.jsonl: no such file; did you mean train\.jsonl"):
        values(tmp_path / "trian.jsonl")
    monkeypatch.chdir(tmp_path.parent)
    with pytest.raises(DataError, match=r"no such file; did you mean train\.jsonl"):  # and no look at the hub
        read(DatasetConfig(path=f"{tmp_path.name}/train"))
    with pytest.raises(DataError, match="no such file"):
        values(tmp_path / "nowhere" / "train.jsonl")


def test_a_folder_that_datasets_did_not_write(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()
    with pytest.raises(DataError, match="expected a folder written by datasets' save_to_disk, or a file"):
        values(tmp_path)


def test_an_unknown_ending_and_a_split_of_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").touch()
    with pytest.raises(DataError, match=r"expected a name ending in \.jsonl"):
        values(tmp_path / "a.csv")
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(DataError, match="a single file has no splits"):
        values(tmp_path / "a.jsonl", split="train")


def test_a_hub_name_that_cannot_be_loaded_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str, split: str | None) -> None:
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(
        DataError, match=r"org/set: no such file or folder here, and.*ConnectionError: no route to the hub"
    ):
        read(DatasetConfig(path="org/set", split="train"))


def test_a_cut_parquet_file(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([GOOD] * 50), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[:-30])
    with pytest.raises(DataError, match=r"a\.parquet: not a whole Parquet file"):
        values(tmp_path / "a.parquet")


# --------------------------------------------------------------------------------------------------------- JSON, JSONL


def test_bad_lines_are_reported_by_line_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "one"}\r\n'  # a byte order mark where it belongs
        b'{"messages":[{"role":"user","content":"hi"}\n'  # cut
        b"\n"
        b'\xef\xbb\xbf{"text": "two"}\n'  # a byte order mark in the middle
        b'{"text": "\xff"}\n'
        b'{"text": "a", "text": "b"}\n'
        b"{'text': 1}\n"
        b'{"text": "three"}\n'
        b"\n  \n"
    )
    found = values(path)
    assert found[0] == {"text": "one"}
    assert found[1].startswith(f"{path}:2: expected one JSON object: Expecting ',' delimiter at column")
    assert found[2] == f"{path}:3: expected an object, found nothing"
    assert "Unexpected UTF-8 BOM" in found[3]
    assert found[4] == f"{path}:5: expected UTF-8, found the byte 0xff"
    assert found[5] == f"{path}:6: the key 'text' comes twice in object {{'text': 'b'}}"
    assert found[6].startswith(f"{path}:7: expected one JSON object: Expecting property name")
    assert found[7:] == [{"text": "three"}]


def test_a_number_with_too_many_digits_and_deep_nesting_are_bad_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": ' + "9" * 5000 + '}\n{"x": ' + "[" * 100_000 + "\n")
    assert ["expected one JSON object" in row for row in values(tmp_path / "a.jsonl")] == [True, True]


def test_rows_are_placed_by_line_number(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n{"text": "b"}\n')
    rows, total = read(DatasetConfig(path=str(tmp_path / "a.jsonl")))
    assert [where.rpartition(":")[2] for where, _ in rows] == ["1", "2", "3"]
    assert total == 3


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            '[{"text": "a"},\n{"text": "b"',
            "expected one JSON array of objects: Expecting ',' delimiter: line 2 column 13",
        ),
        ('[{"text": "a"}\n{"text": "b"}]', "Expecting ',' delimiter: line 2 column 1"),
        ('[{"text": "a"}', "Expecting ',' delimiter: line 1 column 15"),
        ('[{"text": "a"},]', "line 1 column"),
        ('[{"text": "a"}] x', "Extra data: line 1 column 17"),
        ('{"text": "a"}', "expected a JSON array of objects, found object {'text': 'a'}"),
        ("[" * 100_000, "expected one JSON array of objects"),
        ('[{"text": "a", "text": "b"}]', "the key 'text' comes twice"),
        ('{"text": "a"}\n{"text": "b"}', "for one object per line say `format: jsonl`"),
    ],
)
def test_a_broken_json_array(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError) as caught:
        values(tmp_path / "a.json")
    assert problem in str(caught.value)


def test_rows_of_a_json_array_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('\ufeff[\n {"text":\n "a"},\n\n 5]\n', encoding="utf-8")
    rows, total = read(DatasetConfig(path=str(tmp_path / "a.json")))
    assert [(where.rpartition("a.json")[2], value) for where, value in rows] == [
        (" row 0", {"text": "a"}),
        (" row 1", 5),
    ]
    assert total == 2


@settings(deadline=None, derandomize=True, database=None)
@given(st.lists(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=5) | st.none()), max_size=6))
def test_a_json_array_and_jsonl_give_back_what_was_written(tmp_path_factory: Any, rows: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("json")
    (folder / "a.json").write_text(json.dumps(rows, indent=2))
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert values(folder / "a.json") == rows
    assert values(folder / "a.jsonl") == rows


def test_an_empty_array_has_no_rows(tmp_path: Path) -> None:
    for text in ("[]", " [ ] ", ""):
        (tmp_path / "a.json").write_text(text)
        assert values(tmp_path / "a.json") == []


# ---------------------------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize(
    ("answer", "found", "reason"),
    [
        ({"value": 5}, "found object {'value': 5}", "wrong type in completion"),
        (5, "found number 5", "wrong type in completion"),
        (None, "found null", "wrong type in completion"),
        (True, "found boolean True", "wrong type in completion"),
        (float("nan"), "found number nan", "wrong type in completion"),
        ([], "found an empty list", "empty completion"),
        ("", "found an empty string", "empty completion"),
        ("half \ud83d", "lone surrogate U+D83D", "lone surrogate in completion"),
    ],
)
def test_an_answer_that_is_no_text_names_the_field_and_what_was_found(answer: Any, found: str, reason: str) -> None:
    error = refused({"prompt": "Sum of 2 and 3?", "response": answer}, {"completion": "response"})
    assert "'response' (the completion)" in error.detail
    assert found in error.detail
    assert error.reason == reason


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (5, "expected an object with `messages`, or `prompt` and `completion`, or `text`, found number 5"),
        ([GOOD], "found list"),
        ({}, "found the keys (none)"),
        ({"prompt": "q", "response": "a"}, "missing key 'completion', found the keys 'prompt', 'response'"),
        ({"question": "q"}, "`columns: {prompt: their_name, completion: their_name}` maps other names"),
        ({"messages": []}, "field 'messages': expected at least one message, found an empty list"),
        ({"messages": "hi"}, "field 'messages': expected a list of messages, found string 'hi'"),
        ({"messages": ["hi"]}, "field 'messages'[0]: expected an object with role and content, found string 'hi'"),
        ({"messages": [{"content": "hi"}]}, "field 'messages'[0].role: expected a string, found null"),
        ({"messages": [{"from": "human", "value": "hi"}]}, "'messages'[0].role"),
        ({"messages": [{"role": "user"}]}, "field 'messages'[0].content: expected a string or text blocks, found null"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "expected text, found an empty string"),
        ({"messages": [{"role": "user", "content": 3}]}, "field 'messages'[0].content: expected a string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "expected a string or text blocks, found list [{'type': 'image'}]",
        ),
        ({"messages": [{"role": "user", "content": "\udc00"}]}, "lone surrogate U+DC00"),
        ({"messages": [{"role": "user", "content": "q", "x": float("inf")}]}, "expected plain JSON values"),
        ({"messages": [{"role": "assistant", "tool_calls": ["x"]}]}, "expected a list of objects, found string 'x'"),
        ({"messages": [{"role": "user", "content": "q"}], "tools": "{bad"}, "field 'tools': expected JSON text"),
        ({"messages": [{"role": "user", "content": "q"}], "tools": {"a": 1}}, "field 'tools': expected a list of obj"),
        ({"messages": [{"role": "Assistant", "content": "a"}]}, "expected 'user', 'assistant' …, found 'Assistant'"),
        ({"messages": [{"role": "asistant", "content": "a"}]}, "expected 'user', 'assistant' …, found 'asistant'"),
        ({"text": {"a": 1}}, "field 'text': expected a string, found object"),
        ({"text": ""}, "field 'text': expected text, found an empty string"),
    ],
)
def test_every_other_bad_row(row: Any, problem: str) -> None:
    assert problem in refused(row).detail


def test_columns_are_mapped() -> None:
    row = check(
        {"question": "q", "answer": "a", "prompt": "old", "level": 3}, {"prompt": "question", "completion": "answer"}
    )
    assert row.messages == [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def test_a_mapped_column_that_is_missing_and_a_name_that_is_not_ours() -> None:
    error = refused({"question": "q"}, {"prompt": "question", "completion": "answer"})
    assert error.detail == "missing key 'answer' (the completion), found the keys 'question'"
    with pytest.raises(ConfigError, match="found 'anwser', expected our names"):
        check(GOOD, {"anwser": "completion"})


def test_the_first_row_fixes_the_kind() -> None:
    checker = RowChecker({}, as_chat=True)
    checker.check("f:1", {"prompt": "q", "completion": "a", "text": "t"})
    assert str(checker.check("f:2", {"prompt": "q", "text": "t"})).startswith("f:2: missing key 'completion'")


def test_prompt_and_completion_may_be_strings_or_messages() -> None:
    asked, answered = [{"role": "user", "content": "q"}], [{"role": "assistant", "content": "a"}]
    for prompt in ("q", asked):
        for completion in ("a", answered):
            row = check({"prompt": prompt, "completion": completion})
            assert (row.messages, row.answers) == (asked + answered, 1)
    plain = check(GOOD, as_chat=False)
    assert (plain.messages, plain.prompt, plain.completion) == (None, "q", "a")


def test_messages_are_made_plain() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    row = check(
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                    "name": None,
                },
                {"role": "assistant", "content": None, "tool_calls": [call]},
            ],
            "tools": '[{"name": "f"}]',
        }
    )
    assert row.messages == [
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        },
    ]
    assert row.tools == [{"name": "f"}]
