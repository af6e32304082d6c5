"""Rows for a teacher: what becomes of every kind of completion."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from surefoot.alignment import align_rows
from surefoot.config import DataConfig, DatasetConfig
from surefoot.data.encode import Encoder
from surefoot.data.retokenize import Retokenizer, Retold
from surefoot.data.rows import Prompt, RowError, chat_text
from surefoot.data.token_bytes import TokenBytes
from surefoot.errors import ModelError
from tests.helpers.tokenizer_kinds import unigram, word_piece
from tests.helpers.tokenizers import BRACKETS, CHATML, STRICT, byte_level

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


def retold(
    retokenize: Retokenizer, prompt: Prompt, *turns: list[int], said: list[dict[str, str]] | None = None
) -> Retold:
    """Of a student's row with three tokens before each turn."""
    ids = [i for turn in turns for i in [0, 0, 0, *turn]]
    mask = [own for turn in turns for own in [0, 0, 0, *[1] * len(turn)]]
    said = said or [{"role": "assistant", "content": "?"}]
    return retokenize(chat_text(prompt, said), torch.tensor(ids), torch.tensor(mask, dtype=torch.float32))


def refused(*given: Any) -> str:
    with pytest.raises(RowError) as caught:
        retold(*given)
    return str(caught.value)


def completion(student: TokenBytes, text: str, *, ended: bool = True) -> list[int]:
    spelled = student.spell(text)
    assert spelled is not None
    return spelled.ids + [student.end_ids[-1]] * ended


def test_each_side_has_its_own_template_and_end_of_turn(student: TokenBytes, teacher: Any) -> None:
    said = completion(student, "the quick fox")
    row = retold(Retokenizer(student, teacher, DATA, 99), ASKED, said)
    prompt = row.ids[row.mask == 0].tolist()
    assert teacher.decode(prompt) == "<s>[U]what?[/U][A]"
    assert teacher.decode(row.ids[row.mask != 0].tolist()) == "the quick fox<|im_end|>"
    ((ours, theirs),) = row.turns
    assert list(ours) == list(range(1, 15))  # of 13 letters, and the end
    assert theirs[-1] == 14 and len(theirs) < 14
    chunks = align_rows([row.turns])
    assert chunks.first[0][-1] == chunks.second[0][-1] == chunks.num_chunks  # end with end


@pytest.mark.parametrize("text", ["", " ", "\n\n", "日本語", "e\u0301", "👨\u200d👩\u200d👧", "<|im_end|>", "<s>"])
@pytest.mark.parametrize("ended", [True, False])
def test_every_text_is_aligned_to_its_last_byte(student: TokenBytes, teacher: Any, text: str, ended: bool) -> None:
    said = completion(student, text, ended=ended)
    retokenize = Retokenizer(student, teacher, DATA, 99)
    if not said:
        assert refused(retokenize, ASKED, said) == "the completion is empty"
        return
    row = retold(retokenize, ASKED, said)
    assert [ends[-1] for ends in row.turns[0]] == [len(text.encode()) + ended] * 2
    chunks = align_rows([row.turns])
    assert (chunks.first[0] > 0).all() and (chunks.second[0] > 0).all()


def test_a_character_cut_at_the_end_is_left_out(student: TokenBytes, teacher: Any) -> None:
    said = completion(student, "ab日", ended=False)[:-1]
    row = retold(Retokenizer(student, teacher, DATA, 99), ASKED, said)
    assert align_rows([row.turns]).first[0].tolist() == [1, 2, 0, 0]


def test_bytes_that_are_no_text_are_reported(student: TokenBytes, teacher: Any) -> None:
    half = completion(student, "日", ended=False)[:2]
    surrogate = [next(i for i, data in enumerate(student.table) if data == bytes([b])) for b in b"\xed\xa0\x80"]
    for said in (half + completion(student, "a"), surrogate, [*half, student.end_ids[-1]]):
        assert "bytes that are no text" in refused(Retokenizer(student, teacher, DATA, 99), ASKED, said)


def test_a_teacher_that_drops_spaces_is_reported(student: TokenBytes) -> None:
    tokenizer = word_piece()
    retokenize = Retokenizer(student, tokenizer, DATA, 99)
    plain = Prompt("x:1", "the fox", None, None, {})
    assert retold(retokenize, plain, completion(student, "the fox")).turns
    assert "does not give back 'the  fox'" in refused(retokenize, plain, completion(student, "the  fox"))


def test_a_teacher_shorter_than_the_row(student: TokenBytes, teacher: Any) -> None:
    said = completion(student, "the quick fox")
    whole = retold(Retokenizer(student, teacher, DATA, 99), ASKED, said)
    assert whole.cut == 0
    prompt = int((whole.mask == 0).sum())
    cut = retold(Retokenizer(student, teacher, DATA, prompt + 2), ASKED, said)
    assert len(cut.ids) == prompt + 2 and cut.cut == len(whole.ids) - prompt - 2
    assert list(cut.turns[0][1]) == list(whole.turns[0][1][:2])
    found = refused(Retokenizer(student, teacher, DATA, prompt), ASKED, said)
    assert f"the prompt has {prompt} of the teacher's tokens, which reads {prompt}" in found


def test_a_chat_needs_the_teachers_template(student: TokenBytes) -> None:
    with pytest.raises(ModelError, match="no chat template"):
        retold(Retokenizer(student, byte_level(chat_template=None), DATA, 99), ASKED, completion(student, "a"))


def test_a_prompt_that_the_template_refuses_is_reported(student: TokenBytes) -> None:
    strict = "{{ raise_exception('not this') }}"
    retokenize = Retokenizer(student, byte_level(chat_template=strict), DATA, 99)
    assert "refuses the turns [user]: not this" in refused(retokenize, ASKED, completion(student, "a"))


def test_the_space_that_a_student_puts_before_a_text_is_not_the_teachers(teacher: Any) -> None:
    tokenizer = unigram()
    student = tokens_of(tokenizer)
    plain = Prompt("x:1", "what?", None, None, {})
    said = [*tokenizer("the fox", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    ((ours, theirs),) = retold(Retokenizer(student, byte_level(chat_template=CHATML), DATA, 99), plain, said).turns
    assert list(ours) == [3, 7, 8]
    assert theirs[-1] == 8


def test_system_turns_are_not_put_in_twice(student: TokenBytes) -> None:
    data = DATA.model_copy(update={"system_prompt": "be good", "fold_system": True})
    given = Prompt("x:1", "what?", [{"role": "user", "content": "be good\n\nwhat?"}], None, {})
    tokenizer = byte_level()
    row = retold(Retokenizer(student, tokenizer, data, 99), given, completion(student, "a"))
    assert tokenizer.decode(row.ids.tolist()).count("be good") == 1


# -------------------------------------------------------------------------------------------------------- several turns

SAID = [
    {"role": "assistant", "content": "quick"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "the fox"},
]


@pytest.mark.parametrize("ended", [True, False])
def test_each_turn_is_aligned_by_itself(student: TokenBytes, teacher: Any, ended: bool) -> None:
    """What stands between two turns is the teacher's template's, whichever way the first one ended."""
    turns = completion(student, "quick", ended=ended), completion(student, "the fox")
    row = retold(Retokenizer(student, teacher, DATA, 99), ASKED, *turns, said=SAID)
    said = "<s>[U]what?[/U][A]quick<|im_end|>[/A][U]and?[/U][A]the fox<|im_end|>"
    assert teacher.decode(row.ids.tolist()) == (said if ended else said.replace("<|im_end|>", "", 1))
    assert [ours[-1] for ours, _ in row.turns] == [theirs[-1] for _, theirs in row.turns] == [5 + ended, 8]
    assert int(row.mask.sum()) == sum(len(theirs) for _, theirs in row.turns)
    chunks = align_rows([row.turns])
    first, second = (numbers[0].tolist() for numbers in (chunks.first, chunks.second))
    border = first[len(turns[0]) - 1]
    assert first[len(turns[0])] == border + 1
    assert second[len(row.turns[0][1]) - 1] == border and second[len(row.turns[0][1])] == border + 1


def test_the_token_that_ended_a_turn_is_written_once(student: TokenBytes) -> None:
    tokenizer = byte_level(chat_template=CHATML)
    turns = completion(student, "quick"), completion(student, "the fox")
    row = retold(Retokenizer(student, tokenizer, DATA, 99), ASKED, *turns, said=SAID)
    assert "quick<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n" in tokenizer.decode(row.ids.tolist())


def test_a_teacher_shorter_than_the_turns(student: TokenBytes, teacher: Any) -> None:
    turns = completion(student, "quick"), completion(student, "the fox")
    whole = retold(Retokenizer(student, teacher, DATA, 99), ASKED, *turns, said=SAID)
    for length in range(len(whole.ids) - len(whole.turns[1][1]) - 2, len(whole.ids)):
        cut = retold(Retokenizer(student, teacher, DATA, length), ASKED, *turns, said=SAID)
        assert len(cut.ids) == length and cut.cut == len(whole.ids) - length
        assert sum(len(theirs) for _, theirs in cut.turns) == int(cut.mask.sum())


def test_a_chat_that_the_template_refuses_is_reported(student: TokenBytes) -> None:
    turns = completion(student, "quick"), completion(student, "the fox")
    retokenize = Retokenizer(student, byte_level(chat_template=STRICT), DATA, 99)
    tool = [SAID[0], {"role": "tool", "content": "5"}, SAID[2]]
    with pytest.raises(RowError, match="must alternate"):
        retold(retokenize, ASKED, *turns, said=tool)


def test_gaps_in_one_turn_are_no_borders(student: TokenBytes, teacher: Any) -> None:
    """A template's own marks may leave out some of a turn's tokens."""
    row = retold(Retokenizer(student, teacher, DATA, 99), ASKED, *[completion(student, "ab", ended=False)] * 2)
    assert len(row.turns) == 1
    assert teacher.decode(row.ids[row.mask != 0].tolist()) == "abab"
