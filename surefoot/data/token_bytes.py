"""Which bytes of a text each token stands for, and so where in the text each one ends."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from tokenizers import Tokenizer

END = b"\xff"  # what an end-of-turn token stands for here: a byte that no text has

Ends = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Spelled:
    """A text's tokens. `ends` int64 [tokens]: the byte of the text behind each; it never falls."""

    ids: list[int]
    ends: Ends


class TokenBytes:
    """The bytes of each token of a fast tokenizer, in the middle of a text.

    Those of byte-level and byte-fallback tokens are exact, parts of characters too. Of other tokens they are what the
    tokenizer's decoder makes of one that follows another. Special tokens stand for their own names, which in a text are
    tokenized as any other letters.

    Args:
        tokenizer: a Hugging Face fast tokenizer.
        end_ids: tokens that end a turn: all count as the one byte `END`.
    """

    def __init__(self, tokenizer: Any, end_ids: Iterable[int] = ()) -> None:
        self.backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True  # their names in a text are text
        self.end_ids = tuple(end_ids)
        self.special = frozenset(self.backend.get_added_tokens_decoder())
        self.table = _table(self.backend)
        for token in self.end_ids:
            self.table[token] = END
        self.lengths = np.array([len(data) for data in self.table], np.int64)
        written = self.join(self.backend.encode("a", add_special_tokens=False).ids)
        self.adds_space = written == b" a"  # before every text, and takes it off again

    @property
    def fingerprint(self) -> str:
        """Of all that the table follows from."""
        return xxhash.xxh3_128_hexdigest(f"{self.end_ids} {self.backend.to_str()}".encode())

    def __len__(self) -> int:
        """One more than the highest id; models may have further rows, which no text leads to."""
        return len(self.table)

    def join(self, ids: Sequence[int]) -> bytes:
        return b"".join([self.table[i] for i in ids])

    def ends(self, ids: Sequence[int] | npt.NDArray[np.int64]) -> Ends:
        """In the bytes of `join`."""
        return self.lengths[np.asarray(ids, np.int64)].cumsum()

    def read(self, ids: Sequence[int]) -> tuple[bytes, Ends]:
        """The bytes of a text that begins with these tokens, and where in them each ends."""
        data, ends = self.join(ids), self.ends(ids)
        return (data[1:], (ends - 1).clip(min=0)) if self.adds_space and data.startswith(b" ") else (data, ends)

    def spell(self, text: str) -> Spelled | None:
        """The text's tokens and where they end, or `None` where they do not give it back: it has unknown words, or
        spaces that the tokenizer drops, or is no valid Unicode."""
        return self.spell_all([text])[0]

    def spell_all(self, texts: Sequence[str]) -> list[Spelled | None]:
        """`spell` for many texts, which is faster."""
        data = [_utf8(text) for text in texts]
        valid = [text if known is not None else "" for text, known in zip(texts, data, strict=True)]
        encodings = self.backend.encode_batch(valid, add_special_tokens=False)
        return [
            None if known is None else self._spelled(text, known, encoding)
            for text, known, encoding in zip(texts, data, encodings, strict=True)
        ]

    def _spelled(self, text: str, data: bytes, encoding: Any) -> Spelled | None:
        ids = encoding.ids
        joined = self.join(ids)
        if joined == data:
            return Spelled(ids, self.ends(ids))
        if self.adds_space and joined == b" " + data:
            return Spelled(ids, (self.ends(ids) - 1).clip(min=0))
        if self.backend.decode(ids, skip_special_tokens=False) != text:
            return None
        at = [0, *accumulate(len(character.encode()) for character in text)]
        ends = np.maximum.accumulate(np.array([at[end] for _, end in encoding.offsets], np.int64))
        ends[len(ends) - 1 :] = len(data)  # what is behind the last token, such as a space, is its own
        return Spelled(ids, ends)


def _utf8(text: str) -> bytes | None:
    try:
        return text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return None


def _table(backend: Tokenizer) -> list[bytes]:
    """The bytes of each id. Ids that the vocabulary leaves out have none."""
    pieces = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (1 + max(pieces.values(), default=-1))
    added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
    kinds = _decoders(json.loads(backend.to_str())["decoder"])
    plain = {piece: i for piece, i in pieces.items() if i not in added}
    if "ByteLevel" in kinds:
        of = {character: byte for byte, character in enumerate(_BYTE_LEVEL)}
        for piece, i in plain.items():
            table[i] = bytes(of[c] for c in piece) if all(c in of for c in piece) else piece.encode()
    else:
        for (piece, i), text in zip(plain.items(), _decoded(backend, plain), strict=True):
            byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece) if "ByteFallback" in kinds else None
            table[i] = bytes.fromhex(byte[1]) if byte else text.encode()
    for i, content in added.items():
        table[i] = content.encode()
    return table


def _decoders(decoder: Any) -> set[str]:
    """The names of all the decoders that a tokenizer's decoder consists of."""
    if decoder is None:
        return set()
    return {decoder["type"]}.union(*(_decoders(part) for part in decoder.get("decoders", ())))


def _decoded(backend: Tokenizer, pieces: dict[str, int]) -> list[str]:
    """What each piece adds to a text that has begun: decoded behind another piece, of letters, whose text is taken off
    again."""
    before = min((i for piece, i in pieces.items() if piece.isascii() and piece.isalpha()), default=None)
    if before is None:
        return [backend.decode([i], skip_special_tokens=False) for i in pieces.values()]
    begun = backend.decode([before], skip_special_tokens=False)
    texts = backend.decode_batch([[before, i] for i in pieces.values()], skip_special_tokens=False)
    return [text.removeprefix(begun) for text in texts]


def _byte_level() -> str:
    """The character that stands for each byte in a byte-level vocabulary: itself where it is visible, else one of those
    from 256 on, in order."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return "".join(chr(byte if byte in visible else next(others)) for byte in range(256))


_BYTE_LEVEL = _byte_level()
