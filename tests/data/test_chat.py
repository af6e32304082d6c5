"""What is trained of a chat, under every manner of template."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from surefoot.config import DataConfig, DatasetConfig
from surefoot.data.chat import with_system
from surefoot.data.encode import Encoded, Encoder, Outcome
from surefoot.data.rows import BadRow, Row, RowError
from surefoot.errors import ModelError
from tests.helpers import tokenizers as tiny

TURNS = [("user", "what is 2"), ("assistant", "it is 2"), ("user", "and 3"), ("assistant", "it is 3")]


def chat(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


def encoder_for(tokenizer: PreTrainedTokenizerFast, *, max_length: int = 10_000, **options: Any) -> Encoder:
    data = DataConfig(train=DatasetConfig(path="x"), **options)
    return Encoder(tokenizer, data, max_length)


def encode(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    answers: int | None = None,
    tools: list[Any] | None = None,
    **options: Any,
) -> list[Encoded]:
    outcome = attempt(tokenizer, messages, answers, tools, **options)
    assert not isinstance(outcome, BadRow), outcome
    return outcome


def attempt(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    answers: int | None = None,
    tools: list[Any] | None = None,
    **options: Any,
) -> Outcome:
    row = Row("f:8", messages, len(messages) if answers is None else answers, tools)
    return encoder_for(tokenizer, **options).encode(row)


def trained(tokenizer: PreTrainedTokenizerFast, encoded: list[Encoded]) -> list[list[str]]:
    """For each sequence, the text of each run of trained tokens."""
    return [_runs(tokenizer, sequence.ids, sequence.mask) for sequence in encoded]


def _runs(tokenizer: PreTrainedTokenizerFast, ids: Any, mask: Any) -> list[str]:
    runs: list[list[int]] = []
    before = False
    for token, now in zip(ids.tolist(), mask.tolist(), strict=True):
        if now and not before:
            runs.append([])
        if now:
            runs[-1].append(token)
        before = now
    return [tokenizer.decode(run) for run in runs]


def refusal(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> str:
    outcome = attempt(tokenizer, messages)
    assert isinstance(outcome, BadRow)
    assert outcome.where == "f:8"
    return outcome.detail


# ----------------------------------------------------------------------------------------------------- trained spans


@pytest.mark.parametrize(
    "template",
    [
        tiny.CHATML,
        tiny.CHATML_MARKED,
        tiny.CHATML_MARKED_LAST,
        tiny.CHATML_MARKED_IN_MACRO,
        tiny.CHATML_MARKED_CONTENT_ONLY,
        tiny.CHATML_MARKED_HEADER,
        tiny.CHATML_NO_PROMPT,
    ],
    ids=["plain", "marked", "last marked", "macro", "content marked", "header marked", "no generation prompt"],
)
@pytest.mark.parametrize("turns", [1, 3])
def test_every_answer_is_trained_from_its_first_token_to_its_end_of_turn(template: str, turns: int) -> None:
    tokenizer = tiny.byte_level(chat_template=template)
    messages = chat(*(("user", f"what {i}") if i % 2 == 0 else ("assistant", f"it {i}") for i in range(2 * turns)))
    encoded = encode(tokenizer, messages)
    assert trained(tokenizer, encoded) == [[f"it {i}<|im_end|>" for i in range(1, 2 * turns, 2)]]
    whole = tokenizer.apply_chat_template(messages).input_ids
    assert encoded[0].ids.tolist() == whole[:-1]  # all but the newline behind the last end of turn


@pytest.mark.parametrize("turns", [1, 3])
def test_brackets_that_are_ordinary_text(turns: int) -> None:
    tokenizer = tiny.byte_level(chat_template=tiny.BRACKETS, texts=["[A][/A][U][/U] what it"], merges=80)
    messages = chat(*(("user", f"what {i}") if i % 2 == 0 else ("assistant", f"it {i}") for i in range(2 * turns)))
    encoded = encode(tokenizer, messages)
    assert trained(tokenizer, encoded) == [[f"it {i}[/A]" for i in range(1, 2 * turns, 2)]]
    assert tokenizer.decode(encoded[0].ids) == tokenizer.apply_chat_template(messages, tokenize=False)


def test_the_last_answer_alone() -> None:
    tokenizer = tiny.byte_level()
    encoded = encode(tokenizer, chat(*TURNS), train_on="last_assistant")
    assert trained(tokenizer, encoded) == [["it is 3<|im_end|>"]]


def test_only_the_completion_of_a_pair_is_trained() -> None:
    tokenizer = tiny.byte_level()
    assert trained(tokenizer, encode(tokenizer, chat(*TURNS), answers=1)) == [["it is 3<|im_end|>"]]


def test_what_follows_the_last_answer_is_left_out() -> None:
    tokenizer = tiny.byte_level()
    encoded = encode(tokenizer, chat(*TURNS, ("user", "thanks")))
    assert encoded[0].ids.tolist() == encode(tokenizer, chat(*TURNS))[0].ids.tolist()


@pytest.mark.parametrize("messages", [chat(("system", "be kind")), chat(("user", "hi"), ("system", "s"))])
def test_a_chat_without_an_answer_gives_nothing_to_train(messages: list[dict[str, Any]]) -> None:
    assert encode(tiny.byte_level(), messages) == []


def test_a_template_that_strips_thoughts_gives_each_turn_as_it_is_generated() -> None:
    """Two answers with thoughts; in the second turn's prompt the first answer has lost its own."""
    tokenizer = tiny.byte_level(chat_template=tiny.CHATML_THOUGHTS_STRIPPED)
    messages = chat(
        ("user", "a"), ("assistant", "<think>x</think>one"), ("user", "b"), ("assistant", "<think>y</think>two")
    )
    encoded = encode(tokenizer, messages)
    assert trained(tokenizer, encoded) == [["<think>x</think>one<|im_end|>"], ["<think>y</think>two<|im_end|>"]]
    assert "<think>x" not in tokenizer.decode(encoded[1].ids)
    last = encode(tokenizer, messages, train_on="last_assistant")
    assert trained(tokenizer, last) == [["<think>y</think>two<|im_end|>"]]


def test_a_generation_prompt_that_the_turn_does_not_go_on_from() -> None:
    tokenizer = tiny.byte_level(chat_template=tiny.CHATML_THINK_PROMPT)
    message = refusal(tokenizer, chat(("user", "a"), ("assistant", "b")))
    assert "what to train of message 1 cannot be told" in message
    assert "<think>" in message
    thoughtful = encode(tokenizer, chat(("user", "a"), ("assistant", "<think>\nc</think>b")))
    assert trained(tokenizer, thoughtful) == [["c</think>b<|im_end|>"]]


def test_a_template_without_a_generation_prompt_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        encoder_for(tiny.byte_level(chat_template=tiny.CHATML_NO_PROMPT))
        encoder_for(tiny.byte_level(chat_template=tiny.BRACKETS))
    assert "no generation prompt: it writes '<|im_start|>assistant\\n' before answers" in caplog.text
    assert "no special token behind an answer" in caplog.text


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ({"content": "it is", "thoughts": "hm"}, "<think>hm</think>it is<|im_end|>"),
        ({"tool_calls": [{"name": "add"}]}, "CALL add<|im_end|>"),
    ],
)
def test_what_an_answer_begins_with_is_no_header(answer: dict[str, Any], wanted: str) -> None:
    """No generation prompt, answers that do not begin with their content, and a template that refuses odd chats."""
    body = (
        "{% if m.thoughts %}<think>{{ m.thoughts }}</think>{% endif %}{{ m.content }}"
        "{% for call in m.tool_calls or [] %}CALL {{ call.name }}{% endfor %}"
    )
    needs_system = "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}"
    tokenizer = tiny.byte_level(chat_template=needs_system + tiny.CHATML_NO_PROMPT.replace("{{ m['content'] }}", body))
    messages = [*chat(("system", "s"), ("user", "q")), {"role": "assistant", **answer}]
    assert trained(tokenizer, encode(tokenizer, messages)) == [[wanted]]


def test_a_template_that_writes_the_date_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        encoder_for(tiny.byte_level(chat_template="{{ strftime_now('%d') }}" + tiny.CHATML))
    assert "writes today's date" in caplog.text


def test_an_answer_that_begins_inside_a_token_is_cut_as_in_generation() -> None:
    """The header ends in a newline and the answer begins with one; together they are one token."""
    tokenizer = tiny.byte_level()
    messages = chat(("user", "a"), ("assistant", "\nb"))
    encoded = encode(tokenizer, messages)
    assert trained(tokenizer, encoded) == [["\nb<|im_end|>"]]
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True).input_ids
    assert encoded[0].ids.tolist()[: len(prompt)] == prompt
    assert len(tokenizer.tokenize("\n\n")) == 1


def test_a_tokenizer_that_puts_a_space_before_texts_never_gets_one_in_the_middle() -> None:
    tokenizer = tiny.with_prefix_space()
    encoded = encode(tokenizer, chat(("user", "ab"), ("assistant", "cd"), ("user", "ef"), ("assistant", "gh")))
    assert (
        encoded[0].ids.tolist()
        == tokenizer.apply_chat_template(
            chat(("user", "ab"), ("assistant", "cd"), ("user", "ef"), ("assistant", "gh"))
        ).input_ids[: len(encoded[0].ids)]
    )
    assert trained(tokenizer, encoded) == [["cd<|im_end|>", "gh<|im_end|>"]]


def test_a_cut_that_would_change_the_text_is_refused() -> None:
    """The generation prompt ends in a space, which is one token with the answer's first letter; alone, the answer would
    get a second space in front."""
    tokenizer = tiny.with_prefix_space()
    tokenizer.chat_template = tiny.BRACKETS.replace("[A]", "[A] ")
    message = refusal(tokenizer, chat(("user", "ab"), ("assistant", "cd")))
    assert "no token edge lies where an answer begins or ends" in message
    assert "[A] cd" in message


def test_tools_reach_the_template() -> None:
    tokenizer = tiny.byte_level(chat_template=tiny.WITH_TOOLS)
    encoded = encode(tokenizer, chat(*TURNS), tools=[{"name": "add"}])
    assert '[{"name": "add"}]' in tokenizer.decode(encoded[0].ids)
    tokenizer.chat_template = {"default": tiny.CHATML, "tool_use": tiny.WITH_TOOLS}
    assert encode(tokenizer, chat(*TURNS), tools=[{"name": "add"}])[0].ids.tolist() == encoded[0].ids.tolist()


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.tuples(st.text(max_size=8), st.text(min_size=1, max_size=8)), min_size=1, max_size=3),
    st.sampled_from([tiny.CHATML, tiny.CHATML_MARKED, tiny.CHATML_MARKED_IN_MACRO, tiny.BRACKETS]),
)
def test_trained_tokens_spell_the_answers_and_all_tokens_spell_the_chat(
    pairs: list[tuple[str, str]], template: str
) -> None:
    tokenizer = TOKENIZERS.setdefault(template, tiny.byte_level(chat_template=template))
    messages = chat(*(turn for q, a in pairs for turn in (("user", q), ("assistant", a))))
    encoded = encode(tokenizer, messages)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    end = "[/A]" if template == tiny.BRACKETS else "<|im_end|>"
    assert whole.rstrip("\n").startswith(tokenizer.decode(encoded[0].ids).rstrip("\n"))
    spelled = "".join("".join(runs) for runs in trained(tokenizer, encoded))
    assert spelled == "".join(a + end for _, a in pairs)


TOKENIZERS: dict[str, PreTrainedTokenizerFast] = {}


# -------------------------------------------------------------------------------------------------- strict templates


@pytest.mark.parametrize(
    ("roles", "reason"),
    [
        (["system", "user", "assistant"], "System role not supported"),
        (["user", "user", "assistant"], "Conversation roles must alternate user/assistant"),
        (["user", "assistant", "tool"], "Conversation roles must alternate user/assistant"),
        (["assistant"], "Conversation roles must alternate user/assistant"),
    ],
)
def test_a_template_that_refuses_a_chat_is_quoted(roles: list[str], reason: str) -> None:
    message = refusal(tiny.byte_level(chat_template=tiny.STRICT), chat(*((role, "x") for role in roles)))
    assert f"the chat template refuses the turns [{', '.join(roles)}]: {reason}" in message


def test_a_chat_that_begins_with_an_answer() -> None:
    tokenizer = tiny.byte_level()
    assert trained(tokenizer, encode(tokenizer, chat(("assistant", "hello")))) == [["hello<|im_end|>"]]
    needs_first = "{% set first = messages[0]['role'] %}" + tiny.CHATML
    tokenizer.chat_template = needs_first
    assert "the chat template refuses the turns []" in refusal(tokenizer, chat(("assistant", "hello")))


def test_folding_the_system_turn() -> None:
    tokenizer = tiny.byte_level(chat_template=tiny.STRICT)
    messages = chat(("system", "be kind"), ("user", "hi"), ("assistant", "yo"))
    encoded = encode(tokenizer, messages, fold_system=True)
    assert "<|im_start|>user\nbe kind\n\nhi<|im_end|>" in tokenizer.decode(encoded[0].ids)
    assert trained(tokenizer, encoded) == [["yo<|im_end|>"]]
    with pytest.raises(RowError, match="expected a user turn next, found a assistant turn"):
        with_system(chat(("system", "s"), ("assistant", "a")), None, fold=True)
    with pytest.raises(RowError, match="found nothing"):
        with_system(chat(("system", "s")), None, fold=True)


def test_the_system_prompt_comes_where_there_is_none() -> None:
    assert with_system(chat(("user", "q")), "s", fold=False) == chat(("system", "s"), ("user", "q"))
    assert with_system(chat(("system", "t"), ("user", "q")), "s", fold=False) == chat(("system", "t"), ("user", "q"))
    assert with_system(chat(("user", "q")), "s", fold=True) == chat(("user", "s\n\nq"))
    tokenizer = tiny.byte_level()
    encoded = encode(tokenizer, chat(("user", "q"), ("assistant", "a")), answers=1, system_prompt="s")
    assert tokenizer.decode(encoded[0].ids).startswith("<|im_start|>system\ns<|im_end|>")
    assert trained(tokenizer, encoded) == [["a<|im_end|>"]]


# --------------------------------------------------------------------------------------------------------- BOS and EOS


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("template", [tiny.WITH_BOS, tiny.WITH_BOS_BY_VARIABLE, tiny.CHATML])
def test_one_bos_whoever_writes_it(adds_bos: bool, template: str) -> None:
    tokenizer = tiny.byte_level(chat_template=template, adds_bos=adds_bos)
    encoder = encoder_for(tokenizer)
    messages = chat(*TURNS)
    (sequence,) = encode(tokenizer, messages)
    ids = sequence.ids.tolist()
    wanted = 1 if adds_bos or template != tiny.CHATML else 0
    assert ids.count(tokenizer.bos_token_id) == wanted
    assert wanted == 0 or ids[0] == tokenizer.bos_token_id
    prompt = encoder.prompt_ids(messages[:3])
    assert ids[: len(prompt)] == prompt
    assert ids[-1] == tokenizer.eos_token_id != ids[-2]


def test_a_tokenizer_whose_bos_opens_turns_gets_none_in_front() -> None:
    tokenizer = tiny.byte_level(bos="<|im_start|>")
    ids = encode(tokenizer, chat(*TURNS))[0].ids.tolist()
    assert ids[:1] == [tokenizer.bos_token_id] != ids[1:2]


# ------------------------------------------------------------------------------------------------------- the template


def test_a_template_that_is_no_jinja() -> None:
    with pytest.raises(ModelError, match="the chat template is not valid Jinja in line 2"):
        encoder_for(tiny.byte_level(chat_template="x\n{% for %}"))


def test_chats_without_any_template_are_an_error() -> None:
    with pytest.raises(ModelError, match="the tokenizer has no chat template"):
        encode(tiny.gpt2_like(), chat(*TURNS))


def test_a_template_that_writes_nothing_trains_nothing() -> None:
    (encoded,) = encode(tiny.byte_level(chat_template="{{ '' }}"), chat(*TURNS[:2]))
    assert len(encoded.ids) == len(encoded.mask) == 0
