"""Rollouts of several turns, token by token, against what the chat template writes of the whole conversation."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from surefoot.config import DataConfig, DatasetConfig
from surefoot.data.encode import Encoder
from surefoot.data.rows import Prompt
from surefoot.errors import ModelError
from surefoot.rollout.conversations import Conversations, Said
from surefoot.rollout.environments import EnvironmentConfig
from surefoot.rollout.environments.arithmetic import Arithmetic
from surefoot.rollout.environments.calculator import Calculator
from surefoot.rollout.environments.guessing import Guessing
from surefoot.rollout.turns import check_turns
from surefoot.rollout.workers import CallFailed
from surefoot.types import Completion
from tests.helpers import tokenizers as tiny

TRIMMED = tiny.CHATML.replace("m['content']", "m['content'] | trim")
TOOL_RESULTS = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}<|im_start|>"
    "{{ 'user' if m['role'] == 'tool' else m['role'] }}\n"
    "{% if m['role'] == 'tool' %}<result>{{ m['content'] }}</result>{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EOS_AFTER_THE_LAST = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% if loop.last %}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMES_ONLY = "{% for m in messages %}<|im_start|>{{ m['role'] }}<|im_end|>\n{% endfor %}"
# As Qwen 3 has it: thoughts stay while only tools reply, and go once the user says something.
THOUGHTS_UNTIL_THE_USER = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% set later = messages[loop.index:] | map(attribute='role') %}"
    "{% if m['role'] == 'assistant' and 'user' in later | list %}{{ m['content'].split('</think>')[-1] | trim }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def encoder_of(tokenizer: Any, **options: Any) -> Encoder:
    return Encoder(tokenizer, DataConfig(train=DatasetConfig(path="-"), **options), 1000)


def check(tokenizer: Any, role: str = "tool", **options: Any) -> None:
    environment = {"tool": Calculator, "user": Guessing, "nobody": Arithmetic}[role]()
    check_turns(
        encoder_of(tokenizer, **options), tokenizer, role=environment.reply_role, tools=environment.tool_schemas
    )


# ------------------------------------------------------------------------------------------------------- the template


@pytest.mark.parametrize(
    "template", [tiny.CHATML, TRIMMED, TOOL_RESULTS, tiny.CHATML_NO_PROMPT, tiny.WITH_BOS, tiny.CHATML_MARKED]
)
def test_templates_that_leave_earlier_turns_as_they_are(template: str) -> None:
    for adds_bos in (True, False):
        check(tiny.byte_level(chat_template=template, adds_bos=adds_bos))
    check(tiny.byte_level(chat_template=template), system_prompt="be kind")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (tiny.CHATML_THOUGHTS_STRIPPED, r"writes 'b<\|im_end\|>\\n.* where the model has said '<think>"),
        (EOS_AFTER_THE_LAST, "ends turns with a token of their own"),
        (NAMES_ONLY, "cannot be sampled: "),
        (tiny.STRICT, r"refuses the turns \[user, assistant, tool\]: Conversation roles must alternate"),
    ],
)
def test_templates_that_are_refused(template: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check(tiny.byte_level(chat_template=template))


def test_it_depends_on_who_replies() -> None:
    tokenizer = tiny.byte_level(chat_template=THOUGHTS_UNTIL_THE_USER)
    check(tokenizer, "tool")
    with pytest.raises(ModelError, match="and a user turn follows"):
        check(tokenizer, "user")
    check(tokenizer, "nobody")


def test_turns_that_end_in_plain_text_are_refused() -> None:
    """This tokenizer puts a space before each text that it is given, so that a reply alone has other tokens."""
    letters = tiny.with_prefix_space()
    letters.chat_template = tiny.BRACKETS
    with pytest.raises(ModelError, match="ends turns with a token of their own"):
        check(letters, "user")
    with pytest.raises(ModelError, match="no chat template"):
        check(tiny.gpt2_like(), "user")


# ------------------------------------------------------------------------------------------------------------- rollouts


class Scripted:
    """Says what it is told to, in tokens of one character each, so that these are not the ones that the tokenizer would
    choose. Remembers what it was given."""

    def __init__(self, tokenizer: Any, *texts: str, ended: bool = True, version: int = 3) -> None:
        self._tokenizer, self._texts, self._ended, self._version = tokenizer, texts, ended, version
        self.given: list[tuple[list[int], int, int]] = []
        self.prompt_ids: list[int] = []

    def ids(self, text: str) -> list[int]:
        pieces = [self._tokenizer.encode(c, add_special_tokens=False) for c in text]
        end = [self._tokenizer.convert_tokens_to_ids("<|im_end|>")] if self._ended else []
        return [token for piece in pieces for token in piece] + end

    async def __call__(self, ids: Any, turn: int, room: int) -> tuple[Completion, str]:
        self.given.append((list(ids), turn, room))
        said = self.ids(self._texts[turn])
        cut = tuple(said[:room])
        reason = "stop" if len(cut) == len(said) else "length"
        text = self._tokenizer.decode(cut[:-1] if self._ended and reason == "stop" else cut)
        return Completion(cut, tuple(-0.5 - i for i in range(len(cut))), reason, self._version), text  # type: ignore[arg-type]


def play(
    name: str, row: dict[str, Any], sample: Scripted, tokenizer: Any, *, max_turns: int = 4, max_tokens: int = 1000
) -> Said:
    encoder, config = encoder_of(tokenizer), EnvironmentConfig(name=name, max_turns=max_turns)
    with closing(Conversations(config, encoder, max_tokens=max_tokens, seed=0)) as conversations:
        return said(conversations, row, sample, encoder)


def said(conversations: Conversations, row: dict[str, Any], sample: Scripted, encoder: Encoder) -> Said:
    messages, tools = conversations.open(row)
    columns = {key: value for key, value in row.items() if key != "prompt"}
    prompt = Prompt("here", row["prompt"], messages, tools, columns)
    sample.prompt_ids = encoder.prompt_ids(messages, tools)
    return asyncio.run(conversations.talk("e0_d0_g0", prompt, sample.prompt_ids, encoder.stop_ids(), sample))


CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "12*34"}}</tool_call>'
QUESTION = {"prompt": "12*34=", "answer": "408"}


def test_the_models_own_tokens_stay_as_they_were_sampled() -> None:
    tokenizer = tiny.byte_level(chat_template=TOOL_RESULTS)
    sample = Scripted(tokenizer, CALL, "It is 408.")
    found = play("calculator", QUESTION, sample, tokenizer)
    turns = [sample.ids(CALL), sample.ids("It is 408.")]
    between = found.ids[len(turns[0]) : -len(turns[1])]
    assert tokenizer.decode(between) == "\n<|im_start|>user\n<result>408</result><|im_end|>\n<|im_start|>assistant\n"
    assert found.ids == [*turns[0], *between, *turns[1]]
    assert found.own == [True] * len(turns[0]) + [False] * len(between) + [True] * len(turns[1])
    expected = [[-0.5 - i for i in range(len(turn))] for turn in turns]
    assert found.logprobs == [*expected[0], *[0.0] * len(between), *expected[1]]
    assert [message["role"] for message in found.messages] == ["assistant", "tool", "assistant"]
    assert found.messages[0]["content"] == CALL and found.messages[2]["content"] == "It is 408."
    assert (found.reward, found.finish_reason, found.version) == (1.0, "stop", 3)
    # The second turn was asked for behind exactly these tokens, and the text is the template's own.
    opening, tools = [{"role": "user", "content": QUESTION["prompt"]}], Calculator().tool_schemas
    assert sample.given[1][0] == [*sample.prompt_ids, *turns[0], *between]
    text = tokenizer.apply_chat_template(opening + found.messages, tools=tools, tokenize=False)
    assert tokenizer.decode([*sample.prompt_ids, *found.ids]) == text.removesuffix("\n")


def test_a_turn_that_a_stop_text_ended() -> None:
    tokenizer = tiny.byte_level(chat_template=TOOL_RESULTS)
    found = play("calculator", QUESTION, Scripted(tokenizer, CALL, "408", ended=False), tokenizer)
    assert "</tool_call><|im_end|>\n<|im_start|>user" in tokenizer.decode(found.ids)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert found.own[found.ids.index(end)] is False and found.reward == 1.0


def test_turns_run_out() -> None:
    tokenizer = tiny.byte_level()
    found = play("guessing", {"prompt": "?", "secret": 6}, Scripted(tokenizer, "1", "9", "6"), tokenizer, max_turns=2)
    assert (found.reward, found.finish_reason, found.own[-1]) == (None, "turns", True)
    found = play("guessing", {"prompt": "?", "secret": 6}, Scripted(tokenizer, "1", "9", "6"), tokenizer)
    assert found.reward == pytest.approx(0.6) and found.finish_reason == "stop"
    assert [message["content"] for message in found.messages] == ["1", "Higher.", "9", "Lower.", "6"]


def test_tokens_run_out() -> None:
    """In a turn of the model, in what it is answered, or exactly at the end of a turn: no rollout is longer, and none
    ends in tokens that the model never went on from."""
    tokenizer = tiny.byte_level()
    row, texts = {"prompt": "?", "secret": 6}, ("1", "9", "it is 6")
    whole = Scripted(tokenizer, *texts)
    longest = play("guessing", row, whole, tokenizer)
    start = len(whole.prompt_ids)
    encoder, config = encoder_of(tokenizer), EnvironmentConfig(name="guessing", max_turns=4)
    conversations = Conversations(config, encoder, max_tokens=start, seed=0)
    for max_tokens in range(start + 1, start + len(longest.ids) + 1):
        sample = Scripted(tokenizer, *texts)
        conversations.max_tokens = max_tokens
        found = said(conversations, row, sample, encoder)
        assert start + len(found.ids) <= max_tokens
        assert found.ids == longest.ids[: len(found.ids)] and found.own[-1]
        assert len(found.ids) == len(found.own) == len(found.logprobs)
        assert (found.finish_reason == "stop") == (len(found.ids) == len(longest.ids))
        assert all(room == max_tokens - len(ids) > 0 for ids, _, room in sample.given)
    conversations.close()


def test_nothing_is_said() -> None:
    tokenizer = tiny.byte_level()
    found = play("arithmetic", {"prompt": "1+1=", "answer": "2"}, Scripted(tokenizer, ""), tokenizer)
    assert found.messages == [{"role": "assistant", "content": ""}] and found.reward == 0.0
    found = play("guessing", {"prompt": "?", "secret": 6}, Scripted(tokenizer, "", "6", ended=False), tokenizer)
    assert found.reward == 0.8


def test_an_environment_that_raises_is_heard() -> None:
    with pytest.raises(CallFailed, match="KeyError: 'no row 5'"):
        play(
            "tests.rollout.environment_samples.Choosy",
            {"prompt": "?", "answer": "5"},
            Scripted(tiny.byte_level(), "a"),
            tiny.byte_level(),
        )


# -------------------------------------------------------------------------------------------------- tools that hang


def waits(seconds: float, folder: Path) -> str:
    call = {"name": "wait", "arguments": {"seconds": seconds, "folder": str(folder)}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def test_a_tool_that_hangs_is_ended_and_the_model_is_told(tmp_path: Path) -> None:
    """It goes on from there; what hung is not called again, neither is what came before it on the other side."""
    tokenizer, options = tiny.byte_level(), {"tools": ["tests.rollout.environment_samples.wait"]}
    encoder = encoder_of(tokenizer)
    config = EnvironmentConfig(name="tools", options=options, timeout_s=2.0)
    sample = Scripted(tokenizer, waits(0, tmp_path), waits(600, tmp_path), waits(0.25, tmp_path), "done")
    with closing(Conversations(config, encoder, max_tokens=2000, seed=0)) as conversations:
        found = said(conversations, {"prompt": "Wait."}, sample, encoder)
    told = [message["content"] for message in found.messages if message["role"] == "tool"]
    assert told[0] == "waited 0" and told[2] == "waited 0.25"
    assert told[1].startswith("error: it took longer than") and "was ended" in told[1]
    assert (found.failed_turns, found.finish_reason, found.messages[-1]["content"]) == (1, "stop", "done")
    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    assert [seconds for _, seconds in calls].count("600.0") == 1
    own = [token for token, sampled in zip(found.ids, found.own, strict=True) if sampled]
    assert "took longer" not in tokenizer.decode(own) and "took longer" in tokenizer.decode(found.ids)
    assert not any(Path(f"/proc/{process}").exists() for process, _ in calls)
