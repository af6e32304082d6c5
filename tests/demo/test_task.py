"""The task: what is held out, how rows become tokens, and what counts as a right answer."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.demo import task


def pair(row: task.Row) -> tuple[int, int]:
    a, b = task.question(row).removesuffix("=").split("+")
    return int(a), int(b)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return task.train_tokenizer(task.split_rows(0, num_rows=50)[0], tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_heldout_pair_is_in_training_in_neither_order(seed: int) -> None:
    train, heldout = task.split_rows(seed)
    unordered = {frozenset(pair(row)) for row in heldout}
    assert len(heldout) == len(unordered) == 500
    assert not unordered & {frozenset(pair(row)) for row in train}
    # 90 · 91 / 2 unordered pairs in all; whatever is not held out is in training, in both orders.
    assert len({frozenset(pair(row)) for row in train}) == 90 * 91 // 2 - 500
    assert {pair(row) for row in train} == {pair(row)[::-1] for row in train}
    assert all(int(task.expected_answer(row)) == sum(pair(row)) for row in [*train, *heldout])


def test_the_rows_follow_from_the_seed(tmp_path: Path) -> None:
    written = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        task.write_dataset(tmp_path / name / "t.jsonl", tmp_path / name / "h.jsonl", seed, num_rows=40, num_heldout=10)
        written.append([(tmp_path / name / file).read_bytes() for file in ("t.jsonl", "h.jsonl")])
    assert written[0] == written[1]
    assert written[0][0] != written[2][0]
    assert written[0][1] != written[2][1]
    assert task.read_rows(tmp_path / "a" / "t.jsonl") == task.split_rows(3, num_rows=40, num_heldout=10)[0]
    assert len(task.read_rows(tmp_path / "a" / "t.jsonl")) == 40


def test_the_vocabulary_is_whole_even_from_one_row(tmp_path: Path, tokenizer: Any) -> None:
    few = task.train_tokenizer([task.addition(11, 11)], tmp_path)
    assert few.get_vocab() == tokenizer.get_vocab()
    assert len(few) == 19


def test_the_other_tokenizer_has_a_token_for_each_sum_of_three_digits(tmp_path: Path) -> None:
    rows = task.split_rows(0)[0]
    other = task.train_tokenizer(rows, tmp_path, task.TRIPLES)
    assert other.tokenize("47+85=132") == [*"47+85=", "132"] and other.tokenize("12+34=46") == list("12+34=46")
    sums = {task.expected_answer(row) for row in rows}
    assert {total for total in sums if len(total) == 3} == {text for text in other.get_vocab() if len(text) == 3}


def test_the_mask_covers_the_answer_and_the_end_of_its_turn(tokenizer: Any) -> None:
    encoded = tokenizer.apply_chat_template(
        task.addition(47, 85)["messages"], return_dict=True, return_assistant_tokens_mask=True
    )
    tokens = tokenizer.convert_ids_to_tokens(encoded["input_ids"])
    assert tokens == ["<|bos|>", "<|user|>", *"47+85=", "<|end|>", "<|assistant|>", *"132", "<|end|>"]
    trained = [token for token, mask in zip(tokens, encoded["assistant_masks"], strict=True) if mask]
    assert trained == [*"132", "<|end|>"]


def test_exact_match_counts_only_the_very_text() -> None:
    rows = [task.addition(10, 11), task.addition(10, 12), task.addition(10, 13), task.addition(10, 14)]
    assert task.exact_match(["21", "22", "23", "24"], rows) == 1.0
    assert task.exact_match(["21", " 22", "23…", "42"], rows) == 0.25
    with pytest.raises(ValueError, match="longer"):
        task.exact_match(["21"], rows)


class Scripted:
    """Generates what it was told to, after whatever prompt."""

    def __init__(self, new: list[list[int]]) -> None:
        self.new = torch.tensor(new)

    def eval(self) -> None:
        pass

    def generate(self, input_ids: torch.Tensor, **settings: Any) -> torch.Tensor:
        return torch.cat([input_ids, self.new], dim=1)


def test_an_answer_ends_where_its_turn_ends(tokenizer: Any) -> None:
    said = [["5", "7", "<|end|>", "1"], [*"1234"], ["5", "<|user|>", "7", "<|end|>"]]
    new = [tokenizer.convert_tokens_to_ids(tokens) for tokens in said]
    rows = [task.addition(30, 27), task.addition(10, 99), task.addition(31, 26)]
    answers = task.greedy_answers(Scripted(new), tokenizer, rows)
    assert answers == ["57", "1234…", "5<|user|>7"]
    assert task.exact_match(answers, rows) == pytest.approx(1 / 3)


@pytest.fixture(scope="module")
def llama(tokenizer: Any) -> Any:
    """Of random weights, and so unsure of everything."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    init = {**task.model_init(hidden_size=16, num_layers=1), "initializer_range": 0.5}
    return LlamaForCausalLM(LlamaConfig(**init, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)).eval()


def test_answers_are_drawn_from_the_models_own_distribution(tokenizer: Any, llama: Any) -> None:
    num = 4000
    drawn = task.sampled_answers(llama, tokenizer, [task.addition(47, 85)] * num, seed=0)
    prompt = tokenizer.apply_chat_template(
        task.addition(47, 85)["messages"][:1], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    with torch.no_grad():
        shares = llama(**prompt).logits[0, -1].softmax(-1)
    for token, share in zip(
        "0123456789", shares[tokenizer.convert_tokens_to_ids(list("0123456789"))].tolist(), strict=True
    ):
        deviation = (share * (1 - share) / num) ** 0.5
        assert sum(answer.startswith(token) for answer in drawn) / num == pytest.approx(share, abs=4 * deviation), token


def test_drawn_answers_follow_from_the_seed_alone(tokenizer: Any, llama: Any) -> None:
    rows = task.split_rows(0, num_heldout=50)[1]
    torch.manual_seed(1)
    state = torch.get_rng_state()
    once = task.sampled_answers(llama, tokenizer, rows, seed=0)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    assert task.sampled_answers(llama, tokenizer, rows, seed=0) == once
    assert task.sampled_answers(llama, tokenizer, rows, seed=1) != once


def test_a_score_is_that_of_the_last_real_token(tokenizer: Any) -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    init = task.model_init(hidden_size=16, num_layers=1)
    model = LlamaForSequenceClassification(
        LlamaConfig(**init, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, num_labels=1)
    ).eval()
    rng = random.Random(0)
    pairs = [task.preference(task.addition(*sum_), rng) for sum_ in ((10, 11), (47, 85), (60, 39))]
    for side in ("chosen", "rejected"):
        together = task.scores(model, tokenizer, pairs, side)
        for pair, score in zip(pairs, together, strict=True):
            chat = tokenizer.apply_chat_template(pair["prompt"] + pair[side], return_dict=True, return_tensors="pt")
            with torch.no_grad():
                hidden = model.model(**chat).last_hidden_state[0, -1]
            assert score == pytest.approx(model.score(hidden).item(), abs=1e-5)


def test_importing_the_task_is_light() -> None:
    code = "import sys, surefoot.demo.task; print({'torch', 'transformers', 'tokenizers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
