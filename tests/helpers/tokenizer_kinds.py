"""One small tokenizer of each kind that splits a text in its own way, trained on the spot."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.helpers.tokenizers import CHATML, byte_level

TEXTS = (
    "the quick brown fox jumps over the lazy dog. it's what is 2 + 3? it is 5!",
    "Natalia sold clips to 48 of her friends in April, and then half as many in May.",
    "日本語 と 中文 \N{FAMILY} naïve café – “quoted”",
)


@cache
def byte_level_bpe() -> PreTrainedTokenizerFast:
    return byte_level(texts=TEXTS, merges=120)


@cache
def unigram() -> PreTrainedTokenizerFast:
    """As SentencePiece has it: "▁" for spaces, one put before every text, and bytes for what is unknown."""
    scores = [(word, -8.0 + 0.5 * min(len(word), 6)) for word in sorted(_pieces())]
    vocabulary = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((f"<0x{b:02X}>", -20.0) for b in range(256)), *scores]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrapped(tokenizer, "<s>", "</s>")


@cache
def word_piece() -> PreTrainedTokenizerFast:
    """As BERT has it: spaces are dropped, and what is not in the vocabulary is unknown."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator([*TEXTS] * 5, trainer)
    return _wrapped(tokenizer, "[CLS]", "[SEP]")


@cache
def characters() -> PreTrainedTokenizerFast:
    """One token for each character of the texts; every other one is unknown."""
    names = ["<unk>", "<s>", "</s>", *sorted({character for text in TEXTS for character in text})]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    return _wrapped(tokenizer, "<s>", "</s>")


@cache
def pieces_of_sums() -> PreTrainedTokenizerFast:
    """Byte-level, with several digits to a token, and a chat template of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    sums = [f"{a}+{b}={a + b}" for a in range(10, 99, 7) for b in range(10, 99, 3)]
    tokenizer.train_from_iterator([*sums, *["user", "assistant"] * 90], trainer)
    made = _wrapped(tokenizer, "<s>", "<|im_end|>")
    made.chat_template = CHATML
    return made


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte-level": byte_level_bpe,
    "unigram": unigram,
    "wordpiece": word_piece,
    "characters": characters,
}


def _pieces() -> set[str]:
    words = {"▁" + word for text in TEXTS for word in text.split()}
    parts = {word[:n] for word in words for n in (2, 3, 4)} | {word[-n:] for word in words for n in (1, 2, 3)}
    return words | parts | {character for word in words for character in word}


def _wrapped(tokenizer: Tokenizer, bos: str, eos: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=eos)
