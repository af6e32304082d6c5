"""What the demo learns: sums of two two-digit numbers, in characters, by a tiny Llama, from nothing.

Heavy libraries are imported where they are used.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from surefoot.seeds import derive_seed

Row: TypeAlias = "dict[str, list[dict[str, str]]]"  # {"messages": [{"role": …, "content": …}, …]}
Mistake: TypeAlias = "Callable[[str, random.Random], str]"  # from the right answer to a wrong one

NUM_HELDOUT = 500
_LOW, _HIGH = 10, 99
_MAX_NEW_TOKENS = 4  # three digits and the end of the turn

BOS, END, PAD, UNKNOWN = "<|bos|>", "<|end|>", "<|pad|>", "<|unk|>"
CHARACTERS, TRIPLES = r"[\s\S]", r"\d{3}|[\s\S]"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")

# Renders no line breaks: every token counts when a row has fourteen of them.
CHAT_TEMPLATE = (
    "{{- bos_token -}}{%- for message in messages -%}{{- '<|' + message['role'] + '|>' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] + '<|end|>' -}}{%- endgeneration -%}"
    "{%- else -%}{{- message['content'] + '<|end|>' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def addition(a: int, b: int) -> Row:
    """One sum as a chat: the user asks, the assistant answers in plain digits.

    >>> addition(47, 85)["messages"][1]["content"]
    '132'
    """
    question = {"role": "user", "content": f"{a}+{b}="}
    return {"messages": [question, {"role": "assistant", "content": str(a + b)}]}


def split_rows(seed: int, num_rows: int | None = None, num_heldout: int = NUM_HELDOUT) -> tuple[list[Row], list[Row]]:
    """(`num_rows` training rows, or all 7,100, and held-out rows) out of all sums of two two-digit numbers.

    A held-out pair {a, b} is in training in neither order; a training pair is there in both.
    """
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(_LOW, _HIGH + 1) for b in range(a, _HIGH + 1)]
    rng.shuffle(pairs)
    heldout = [addition(*rng.sample(pair, 2)) for pair in pairs[:num_heldout]]
    both_orders = sorted({order for a, b in pairs[num_heldout:] for order in ((a, b), (b, a))})
    rng.shuffle(both_orders)
    return [addition(a, b) for a, b in both_orders[:num_rows]], heldout


def write_dataset(
    train: Path, heldout: Path, seed: int, num_rows: int | None = None, num_heldout: int = NUM_HELDOUT
) -> None:
    """Write `split_rows` as two JSON Lines files; the same arguments write the same bytes."""
    for path, rows in zip((train, heldout), split_rows(seed, num_rows, num_heldout), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def slip(right: str, rng: random.Random) -> str:
    """A wrong answer of as many digits, as one gets that slips in a column or two."""
    near = [int(right) + sign * step for step in (1, 2, 9, 10, 11) for sign in (-1, 1)]
    return rng.choice([str(number) for number in near if len(str(number)) == len(right)])


def guess(right: str, rng: random.Random) -> str:
    """Any other sum of as many digits."""
    low, high = (2 * _LOW, 99) if len(right) == 2 else (100, 2 * _HIGH)
    return str(rng.choice([number for number in range(low, high + 1) if number != int(right)]))


def mistaken(row: Row, rng: random.Random, wrong: Mistake = slip) -> Row:
    """The row with a wrong answer."""
    question, answer = row["messages"]
    return {"messages": [question, {**answer, "content": wrong(answer["content"], rng)}]}


def write_demonstrations(rows: Iterable[Row], file: Path, seed: int, wrong_share: float) -> None:
    """Write the rows, each with a slip by that chance; the same arguments write the same bytes."""
    rng = random.Random(seed)
    shown = [mistaken(row, rng) if rng.random() < wrong_share else row for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in shown), encoding="utf-8")


def preference(row: Row, rng: random.Random, wrong: Mistake = slip) -> Row:
    """The sum's answer against a wrong one, with the question as `prompt`."""
    question, answer = row["messages"]
    return {"prompt": [question], "chosen": [answer], "rejected": [mistaken(row, rng, wrong)["messages"][1]]}


def write_preferences(rows: Iterable[Row], file: Path, seed: int, wrong: Mistake = slip) -> None:
    """Write the rows as preferences; the same arguments write the same bytes."""
    rng = random.Random(seed)
    file.write_text("".join(json.dumps(preference(row, rng, wrong)) + "\n" for row in rows), encoding="utf-8")


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def train_tokenizer(rows: Iterable[Row], folder: Path, words: str = CHARACTERS) -> Any:
    """Train a tokenizer on the rows' texts and save it, its chat template included.

    Args:
        words: a regular expression of what can be a token. With `CHARACTERS` no two digits can be merged, and there are
            19 tokens. With `TRIPLES` 132 is one more token, and so is every other number of three digits in the rows.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(words), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(
        special_tokens=[PAD, BOS, END, UNKNOWN, *ROLES],
        initial_alphabet=list("0123456789+="),
        show_progress=False,
    )
    tokenizer.train_from_iterator((message["content"] for row in rows for message in row["messages"]), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=64,
    )
    fast.save_pretrained(str(folder))
    return fast


def model_init(hidden_size: int = 128, num_layers: int = 2) -> dict[str, Any]:
    """The section `policy.model_init`: 0.43 M parameters unless made smaller. The tokenizer gives the vocabulary."""
    return {
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
    }


def question(row: Row) -> str:
    return row["messages"][0]["content"]


def expected_answer(row: Row) -> str:
    return row["messages"][-1]["content"]


def exact_match(answers: Sequence[str], rows: Sequence[Row]) -> float:
    """The share of rows whose answer is, character for character, the one expected."""
    return sum(answer == expected_answer(row) for answer, row in zip(answers, rows, strict=True)) / len(rows)


def greedy_answers(model: Any, tokenizer: Any, rows: Sequence[Row]) -> list[str]:
    """The most likely answer to each row's question; see `_answers`."""
    return _answers(model, tokenizer, rows, do_sample=False)


def sampled_answers(model: Any, tokenizer: Any, rows: Sequence[Row], seed: int) -> list[str]:
    """An answer to each row's question, drawn from the model's own distribution (temperature 1, whole vocabulary)."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(seed, "demo answers"))
        return _answers(model, tokenizer, rows, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)


def _answers(model: Any, tokenizer: Any, rows: Sequence[Row], **sampling: Any) -> list[str]:
    """Each answer up to the end of the turn; other special tokens stay, since in an answer they are wrong. A turn that
    does not end within four tokens gets an ellipsis, and so is no answer."""
    import torch

    model.eval()
    prompts = tokenizer.apply_chat_template(
        [row["messages"][:-1] for row in rows],  # all of one length: no padding
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    with torch.inference_mode():
        ids = model.generate(**prompts, max_new_tokens=_MAX_NEW_TOKENS, **sampling)
    turns = [tokenizer.decode(new).partition(END) for new in ids[:, prompts["input_ids"].shape[1] :]]
    return [text if end else text + "…" for text, end, _ in turns]


def scores(model: Any, tokenizer: Any, pairs: Sequence[Row], side: str) -> list[float]:
    """The score of each pair's "chosen" or "rejected" answer after its prompt, by a model with one label."""
    import torch

    model.eval()
    chats = tokenizer.apply_chat_template(
        [pair["prompt"] + pair[side] for pair in pairs], padding=True, return_dict=True, return_tensors="pt"
    )
    with torch.inference_mode():
        scored: list[float] = model(**chats).logits[:, 0].tolist()
    return scored
