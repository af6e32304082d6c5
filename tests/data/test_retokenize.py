"""Rows for a teacher: what becomes of every kind of completion."""

from __future__ import annotations

from typing import Any

import pytest

from surefoot.alignment import Tokens, align
from surefoot.config import DataConfig, DatasetConfig
from surefoot.data.encode import Encoder
from surefoot.data.retokenize import Retokenizer, Retold
from surefoot.data.rows import Prompt
from surefoot.data.token_bytes import TokenBytes
from surefoot.errors import ModelError
from tests.helpers.tokenizer_kinds import unigram, word_piece
from tests.helpers.tokenizers import BRACKETS, CHATML, byte_level

DATA = DataConfig(train=DatasetConfig(path="x.jsonl"))
ASKED = Prompt("x:1", "what?", [{"role": "user", "content": "what?"}], None, {})


def tokens_of(tokenizer: Any) -> TokenBytes:
    return TokenBytes(tokenizer, Encoder(tokenizer, DATA, 1).stop_ids())


@pytest.fixture(scope="module")
def student() -> TokenBytes:
    return tokens_of(byte_level(merges=0))


@pytest.fixture(scope="module")
def teacher() -> Any:
    return byte_level(texts=["the quick fox"] * 3, merges=20, chat_template=BRACKETS, adds_bos=True)


def completion(student: TokenBytes, text: str, *, ended: bool = True) -> list[int]:
    spelled = student.spell(text)
    assert spelled is not None
    return spelled.ids + [student.end_ids[-1]] * ended


def test_each_side_has_its_own_template_and_end_of_turn(student: TokenBytes, teacher: Any) -> None:
    said = completion(student, "the quick fox")
    row = Retokenizer(student, teacher, DATA, 99)(ASKED, said)
    assert isinstance(row, Retold)
    prompt = row.ids[row.mask == 0].tolist()
    assert teacher.decode(prompt) == "<s>[U]what?[/U][A]"
    assert teacher.decode(row.ids[row.mask != 0].tolist()) == "the quick fox<|im_end|>"
    assert row.student_ends.tolist() == list(range(1, 15))  # of 13 letters, and the end
    assert row.ends.tolist()[-1] == 14 and len(row.ends) < 14
    chunks = align(Tokens.of([row.student_ends]), Tokens.of([row.ends]))
    assert chunks.first[-1] == chunks.second[-1] == int(chunks.counts) - 1  # end with end


@pytest.mark.parametrize("text", ["", " ", "\n\n", "日本語", "e\u0301", "👨\u200d👩\u200d👧", "<|im_end|>", "<s>"])
@pytest.mark.parametrize("ended", [True, False])
def test_every_text_is_aligned_to_its_last_byte(student: TokenBytes, teacher: Any, text: str, ended: bool) -> None:
    said = completion(student, text, ended=ended)
    row = Retokenizer(student, teacher, DATA, 99)(ASKED, said)
    if not said:
        assert row == "an empty completion"
        return
    assert isinstance(row, Retold)
    assert row.ends.tolist()[-1] == row.student_ends.tolist()[-1] == len(text.encode()) + ended
    chunks = align(Tokens.of([row.student_ends]), Tokens.of([row.ends]))
    assert (chunks.first >= 0).all() and (chunks.second >= 0).all()


def test_a_character_cut_at_the_end_is_left_out(student: TokenBytes, teacher: Any) -> None:
    said = completion(student, "ab日", ended=False)[:-1]
    row = Retokenizer(student, teacher, DATA, 99)(ASKED, said)
    assert isinstance(row, Retold)
    chunks = align(Tokens.of([row.student_ends]), Tokens.of([row.ends]))
    assert chunks.first.tolist() == [0, 1, -1, -1]


def test_bytes_that_are_no_text_are_reported(student: TokenBytes, teacher: Any) -> None:
    half = completion(student, "日", ended=False)[:2]
    surrogate = [next(i for i, data in enumerate(student.table) if data == bytes([b])) for b in b"\xed\xa0\x80"]
    for said in (half + completion(student, "a"), surrogate, [*half, student.end_ids[-1]]):
        assert Retokenizer(student, teacher, DATA, 99)(ASKED, said) == "a completion that is no text"
    assert "lacks" in str(Retokenizer(student, teacher, DATA, 99)(ASKED, [len(student)]))


def test_a_teacher_that_drops_spaces_is_reported(student: TokenBytes) -> None:
    tokenizer = word_piece()
    retokenize = Retokenizer(student, tokenizer, DATA, 99)
    plain = Prompt("x:1", "the fox", None, None, {})
    assert isinstance(retokenize(plain, completion(student, "the fox")), Retold)
    assert "not give back" in str(retokenize(plain, completion(student, "the  fox")))


def test_a_teacher_shorter_than_the_row(student: TokenBytes, teacher: Any) -> None:
    said = completion(student, "the quick fox")
    whole = Retokenizer(student, teacher, DATA, 99)(ASKED, said)
    assert isinstance(whole, Retold) and whole.cut == 0
    prompt = int((whole.mask == 0).sum())
    cut = Retokenizer(student, teacher, DATA, prompt + 2)(ASKED, said)
    assert isinstance(cut, Retold)
    assert len(cut.ids) == prompt + 2 and cut.cut == len(whole.ids) - prompt - 2
    assert cut.ends.tolist() == whole.ends.tolist()[:2]
    assert "without room" in str(Retokenizer(student, teacher, DATA, prompt)(ASKED, said))


def test_a_chat_needs_the_teachers_template(student: TokenBytes) -> None:
    with pytest.raises(ModelError, match="no chat template"):
        Retokenizer(student, byte_level(chat_template=None), DATA, 99)(ASKED, completion(student, "a"))


def test_a_prompt_that_the_template_refuses_is_reported(student: TokenBytes) -> None:
    strict = "{{ raise_exception('not this') }}"
    found = Retokenizer(student, byte_level(chat_template=strict), DATA, 99)(ASKED, completion(student, "a"))
    assert "refuses" in str(found)


def test_the_space_that_a_student_puts_before_a_text_is_not_the_teachers(teacher: Any) -> None:
    tokenizer = unigram()
    student = tokens_of(tokenizer)
    plain = Prompt("x:1", "what?", None, None, {})
    said = [*tokenizer("the fox", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    row = Retokenizer(student, byte_level(chat_template=CHATML), DATA, 99)(plain, said)
    assert isinstance(row, Retold)
    assert row.student_ends.tolist() == [3, 7, 8]
    assert row.ends.tolist()[-1] == 8


def test_system_turns_are_not_put_in_twice(student: TokenBytes) -> None:
    data = DATA.model_copy(update={"system_prompt": "be good", "fold_system": True})
    given = Prompt("x:1", "what?", [{"role": "user", "content": "be good\n\nwhat?"}], None, {})
    tokenizer = byte_level()
    row = Retokenizer(student, tokenizer, data, 99)(given, completion(student, "a"))
    assert isinstance(row, Retold)
    assert tokenizer.decode(row.ids.tolist()).count("be good") == 1
