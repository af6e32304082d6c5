"""Alignment of 5,000 texts between two tokenizers, trained on the spot: a byte-level BPE and a unigram model with byte
fallback. One thread, CPU seconds; the limit is for everything but the tokenization itself.

    python benchmarks/alignment.py [FILE.jsonl COLUMN]

Without a file the texts are those of this repository's pages.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import islice
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from surefoot.alignment import Tokens, align, one_to_one
from surefoot.data.token_bytes import TokenBytes

ROWS, LIMIT_S = 5000, 2.0


def texts() -> list[str]:
    if len(sys.argv) == 3:
        rows = (json.loads(line)[sys.argv[2]] for line in Path(sys.argv[1]).read_text().splitlines())
        return list(islice(rows, ROWS))
    pages = [page.read_text() for page in sorted((Path(__file__).parent.parent / "docs").glob("*.md"))]
    joined = "\n".join(pages)
    return [joined[97 * row % len(joined) :][:300] for row in range(ROWS)]


def byte_level(rows: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(rows[:500], trainer)
    return tokenizer


def unigram(rows: list[str]) -> Tokenizer:
    """Trained without the bytes, which are put to its pieces afterwards."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=1500, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(rows[:500], trainer)
    pieces = [tuple(piece) for piece in json.loads(tokenizer.to_str())["model"]["vocab"]]
    pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    tokenizer.model = models.Unigram(pieces, unk_id=0, byte_fallback=True)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def main() -> None:
    torch.set_num_threads(1)
    rows = texts()
    sides = [TokenBytes(PreTrainedTokenizerFast(tokenizer_object=made)) for made in (byte_level(rows), unigram(rows))]
    start = time.process_time()
    for side in sides:
        side.backend.encode_batch(rows, add_special_tokens=False)
    tokenized = time.process_time() - start
    start = time.process_time()
    spelled = [side.spell_all(rows) for side in sides]
    spans = time.process_time() - start - tokenized
    kept = [(a, b) for a, b in zip(*spelled, strict=True) if a is not None and b is not None]
    start = time.process_time()
    first, second = Tokens.of([a.ends for a, _ in kept]), Tokens.of([b.ends for _, b in kept])
    chunks = align(first, second)
    aligned = time.process_time() - start
    inside = bool((chunks.first >= 0).all()) and bool((chunks.second >= 0).all())
    count = int(chunks.counts.sum())
    table = Table(title=f"{len(rows):,} texts, {len(kept):,} that both tokenizers give back")
    for column in ("what", "value", "limit"):
        table.add_column(column)
    table.add_row("tokens", f"{len(first.ends):,} and {len(second.ends):,}", "")
    table.add_row("chunks", f"{count:,}, {100 * one_to_one(first, second, chunks) / count:.1f} % one to one", "")
    table.add_row("tokenization", f"{tokenized:.2f} s", "")
    table.add_row("byte spans", f"{max(spans, 0.0):.2f} s", "")
    table.add_row("alignment", f"{aligned:.2f} s", f"spans and alignment: {LIMIT_S:g} s")
    table.add_row("bytes in chunks", "100 %" if inside else "not all", "100 %")
    Console().print(table)
    sys.exit(not (inside and kept and max(spans, 0.0) + aligned < LIMIT_S))


if __name__ == "__main__":
    main()
