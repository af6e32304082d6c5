"""What is found out about a teacher with another tokenizer before the first step: how its tokens correspond to the
student's, and so how it reads rows and by which loss it teaches."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.alignment import align_rows
from surefoot.checkpoint import TensorCache, cache_home
from surefoot.data.encode import num_ids
from surefoot.data.retokenize import Retokenizer
from surefoot.data.rows import Prompt, RowError
from surefoot.data.token_bytes import TokenBytes
from surefoot.data.vocabularies import VocabularyMap, map_vocabulary
from surefoot.engine.models import has_same_tokenizer, resolve_device
from surefoot.errors import ModelError
from surefoot.losses.cross_tokenizer import ChunkLoss, Gold, Projection, SameVocabulary
from surefoot.types import Head, Kit

if TYPE_CHECKING:
    from surefoot.algorithms.cross_tokenizer import CrossTokenizerConfig

_log = logging.getLogger(__name__)

_PROBED_TEXTS = 256


@dataclass(frozen=True)
class Reader:
    """
    Attributes:
        head: what the teacher puts out, on its tokens of the student's turns.
        retokenize: `None` where its tokenizer is the student's: then it reads the student's own rows, and each token is
            a chunk.
    """

    head: Head
    loss: ChunkLoss
    retokenize: Retokenizer | None = None

    @property
    def tokenizer(self) -> str:
        """Its fingerprint."""
        return "the student's" if self.retokenize is None else self.retokenize.teacher.fingerprint

    @property
    def template(self) -> str:
        """Its chat template's fingerprint, where it reads by its own."""
        return "the student's" if self.retokenize is None else self.retokenize.template


def reader(name: str, head: Head, student: TokenBytes, config: CrossTokenizerConfig, kit: Kit) -> Reader:
    """Raises `ModelError` when the teacher's tokenizer cannot be aligned with the student's."""
    tokenizer, divergence = kit.tokenizers[name], config.form()
    size, prompts = num_ids(tokenizer), kit.train_data.prompts
    head = replace(head, k=config.top_k or size, inputs=f"{name}/input_ids", mask=f"{name}/mask")
    if has_same_tokenizer(kit.tokenizer, tokenizer):
        return Reader(head, SameVocabulary(divergence, whole=head.k == size))
    spec = config.specs()[name]
    longest = spec.max_length or kit.config.policy.max_total_sequence_length
    retokenize = Retokenizer(student, tokenizer, kit.config.data, longest)
    vocabulary = known_map(student, retokenize.teacher, Path(config.cache) if config.cache else None)
    sources = config.names[name].sources
    own = [prompt for prompt in prompts if not sources or prompt.source in sources]
    report(str(spec.model), vocabulary, retokenize, own or prompts)
    device = resolve_device(kit.config.policy.device)
    if config.loss == "projection":
        rows, columns, weights = (p.to(device) for p in (vocabulary.rows, vocabulary.columns, vocabulary.weights))
        return Reader(head, Projection.of(divergence, rows, columns, weights, size), retokenize)
    merge, whole = config.token_merge or "observed", head.k == size
    pair = (vocabulary.same.to(device), vocabulary.sizes, config.gold_weights)
    return Reader(head, Gold.of(*pair, divergence=divergence, merge=merge, whole=whole), retokenize)


def known_map(student: TokenBytes, teacher: TokenBytes, folder: Path | None) -> VocabularyMap:
    """From the cache, or made and put there. `folder`: default: surefoot/vocabularies in the user's cache."""
    key = {"student": student.fingerprint, "teacher": teacher.fingerprint, "version": "1"}
    with TensorCache(folder or cache_home() / "surefoot" / "vocabularies", key).held() as cache:
        found = cache.read("map")
        if found is None:
            found = map_vocabulary(student, teacher).tensors()
            cache.write("map", found)
    return VocabularyMap(**found, sizes=(len(student), len(teacher)))


def _refusal(retokenize: Retokenizer, prompt: Prompt) -> str:
    """Why the teacher cannot read it; empty where it can. Raises `ModelError` as `report` does."""
    try:
        retokenize.prompt_ids(prompt)
    except RowError as error:
        return error.detail
    return ""


def report(model: str, vocabulary: VocabularyMap, retokenize: Retokenizer, prompts: Sequence[Prompt]) -> None:
    """Says how well the two tokenizers go together, on some texts of the data: answers where rows have them, else what
    is asked.

    Raises:
        ModelError: no token of the student's is one of the teacher's, none of the texts can be aligned, the teacher can
            read none of the prompts, or they are chats and it has no chat template.
    """
    refused = [_refusal(retokenize, prompt) for prompt in prompts[:_PROBED_TEXTS]]
    if all(refused):
        raise ModelError(f"{model} can read none of the first {len(refused)} prompts of the data: {refused[0]}")
    given = [prompt.columns.get("answer") or prompt.shown for prompt in prompts[:_PROBED_TEXTS]]
    texts = [text for text in given if isinstance(text, str) and text]
    sides = [tokens.spell_all(texts) for tokens in (retokenize.student, retokenize.teacher)]
    both = [(a.ends, b.ends) for a, b in zip(*sides, strict=True) if a is not None and b is not None]
    share = f"{100 * vocabulary.mapped_share:.1f} % of the student's {vocabulary.sizes[0]:,} tokens"
    if not vocabulary.same.shape[1] or (texts and not both):
        lost = [sum(text is None for text in side) for side in sides]
        raise ModelError(
            f"{model}: its tokenizer and the student's cannot be aligned: byte-identical are {share}; of {len(texts)} "
            f"texts of the data {lost[0]} are not given back by the student's tokenizer and {lost[1]} by the teacher's "
            "(it drops spaces or has unknown characters). Take a teacher whose tokenizer is byte-level or falls back "
            "to bytes"
        )
    chunks = align_rows([both])
    _log.info(
        "%s has another tokenizer: byte-identical are %s; on %d texts of the data %.1f %% of the chunks are one token "
        "to one, and %d texts cannot be aligned",
        *(model, share, len(texts), 100 * chunks.one_to_one / max(chunks.num_chunks, 1), len(texts) - len(both)),
    )
