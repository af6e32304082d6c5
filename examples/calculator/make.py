"""Writes the data of the calculator example anew: demonstrations of a tool's use, of which seven in ten are wrong, and
a tokenizer that writes the frame of a call as one token.

    python examples/calculator/make.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from surefoot.rollout.environments.calculator import Calculator, calculate

NUM_ROWS = 600
CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "', '"}}</tool_call>'

# The model knows its tool from the demonstrations: the list of tools is not written out.
CHAT_TEMPLATE = (
    "{#- tools: not listed -#}{{- bos_token -}}{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def files(seed: int = 0) -> dict[str, str]:
    """Each file's name and text."""
    rng = random.Random(seed)
    questions = Calculator(num_digits=2).rows(NUM_ROWS, seed)
    rows = [{"messages": _demonstration(row["prompt"], row["answer"], rng)} for row in questions]
    return {"demonstrations.jsonl": "".join(json.dumps(row) + "\n" for row in rows)}


def _demonstration(question: str, answer: str, rng: random.Random) -> list[dict[str, str]]:
    """Three in ten are right. Four answer from the head, and wrong; one and a half each call with another expression,
    or take over another result than the tool's."""
    expression = question.removesuffix("=")
    kind = rng.choices(["right", "no call", "wrong call", "wrong copy"], [6, 8, 3, 3])[0]
    if kind == "wrong call":
        expression = _spoilt(expression, rng)
    result = calculate(expression)
    said = _spoilt(answer, rng) if kind == "no call" else _spoilt(result, rng) if kind == "wrong copy" else result
    asked = [{"role": "user", "content": question}]
    called = [
        {"role": "assistant", "content": expression.join(CALL)},
        {"role": "tool", "name": "calculate", "content": result},
    ]
    return [*asked, *(called if kind != "no call" else []), {"role": "assistant", "content": said}]


def _spoilt(text: str, rng: random.Random) -> str:
    """With another digit in one place."""
    place = rng.choice([i for i, character in enumerate(text) if character.isdigit()])
    other = rng.choice([digit for digit in "123456789" if digit != text[place]])
    return text[:place] + other + text[place + 1 :]


def write_tokenizer(folder: Path) -> None:
    """Each character is a token, and so is each half of a call's frame."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|pad|>", "<|bos|>", "<|end|>", "<|unk|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
    vocabulary = {token: i for i, token in enumerate([*special, *"0123456789+-*/=. "])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(part, normalized=False) for part in CALL])
    roles = {f"{role}_token": f"<|{role}|>" for role in ("pad", "bos", "unk")} | {"eos_token": "<|end|>"}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **roles,
        additional_special_tokens=special[4:],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=96,
    )
    fast.save_pretrained(str(folder))


if __name__ == "__main__":
    for name, text in files().items():
        (Path(__file__).parent / name).write_text(text)
    write_tokenizer(Path(__file__).parent / "tokenizer")
