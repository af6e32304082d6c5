"""Trains a byte-level BPE tokenizer on texts of JSON Lines, and saves it as a Hugging Face folder with a chat template.

python examples/train_tokenizer.py train.jsonl models/gsm8k_tokenizer --columns question answer --size 2048
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, START, END = "<pad>", "<|start|>", "<|end|>"
# What stands between `generation` and `endgeneration` is the assistant's own.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}{{- '<|start|>' + message['role'] + '\\n' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] + '<|end|>' -}}{%- endgeneration -%}"
    "{%- else -%}{{- message['content'] + '<|end|>' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start|>assistant\\n' -}}{%- endif -%}"
)


def texts(file: Path, columns: list[str]) -> Iterator[str]:
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield from (row[column] for column in columns)


def train(found: Iterator[str], size: int) -> PreTrainedTokenizerFast:
    """Of `size` tokens: 3 special ones, the 256 bytes, and merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[PAD, START, END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(found, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="one JSON object per line")
    parser.add_argument("folder", type=Path, help="where the tokenizer goes")
    parser.add_argument("--columns", nargs="+", default=["text"], help="the texts in each row")
    parser.add_argument("--size", type=int, default=2048, help="of the vocabulary")
    asked = parser.parse_args()
    made = train(texts(asked.file, asked.columns), asked.size)
    made.save_pretrained(asked.folder)
