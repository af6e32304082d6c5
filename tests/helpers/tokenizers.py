"""Tiny tokenizers made on the spot, and chat templates of every manner that matters."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_MARKED_LAST = CHATML_MARKED.replace("m['role'] == 'assistant' %}", "m['role'] == 'assistant' and loop.last %}")
CHATML_MARKED_IN_MACRO = (
    "{% macro turn(m) %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{%- generation -%}{{ m['content'] }}<|im_end|>{%- endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_MARKED_CONTENT_ONLY = CHATML_MARKED.replace("<|im_end|>\n{% endgeneration %}", "{% endgeneration %}<|im_end|>\n")
CHATML_MARKED_HEADER = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}<|im_start|>assistant\n"
    "{{ m['content'] }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_THOUGHTS_STRIPPED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_THINK_PROMPT = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
CHATML_NO_PROMPT = CHATML.partition("{% if add_generation_prompt %}")[0]
BRACKETS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}[A]{{ m['content'] }}[/A]"
    "{% else %}[U]{{ m['content'] }}[/U]{% endif %}{% endfor %}{% if add_generation_prompt %}[A]{% endif %}"
)
STRICT = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_BOS = "{{ bos_token }}" + CHATML
WITH_BOS_BY_VARIABLE = "{% set start = bos_token if messages else '' %}{{ start }}" + CHATML
WITH_TOOLS = "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + CHATML

_TEXTS = (
    "the quick brown fox jumps over the lazy dog",
    "what is 2 + 3? it is 5",
    "user assistant system tool",
    "\n\n\n",
)


def byte_level(
    *,
    chat_template: str | None = CHATML,
    adds_bos: bool = False,
    bos: str | None = "<s>",
    eos: str | None = "<|im_end|>",
    pad: str | None = "<|im_end|>",
    texts: Sequence[str] = _TEXTS,
    merges: int = 60,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, as GPT-2, Llama 3 and Qwen have. Any text can be encoded and comes back exactly. As
    with Llama 3 and Qwen, runs of newlines can be one token."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + len(alphabet) + merges,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts] * 5, trainer)
    return _wrapped(tokenizer, chat_template, adds_bos, bos, eos, pad)


def gpt2_like() -> PreTrainedTokenizerFast:
    """One token for begin and end, none for padding, no chat template."""
    return byte_level(chat_template=None, bos="<|im_end|>", pad=None)


def words(vocabulary: Sequence[str], *, chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Whole words split at spaces, each with its id; everything else is <unk>."""
    names = ["<unk>", "<s>", "<|im_start|>", "<|im_end|>", *vocabulary]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _wrapped(tokenizer, chat_template, False, "<s>", "<|im_end|>", "<|im_end|>")


def with_prefix_space(**options: bool) -> PreTrainedTokenizerFast:
    """Characters with a leading "▁" put before every text, as the SentencePiece tokenizers of Llama 2 have."""
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789+?.!,:/[]AU\n▁"]
    vocabulary = {name: i for i, name in enumerate(["<unk>", "<s>", "<|im_start|>", "<|im_end|>", *letters])}
    merges = [("▁", letter) for letter in "abcdefghijklmnopqrstuvwxyz"]
    vocabulary |= {a + b: len(vocabulary) + i for i, (a, b) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return _wrapped(tokenizer, CHATML, options.get("adds_bos", False), "<s>", "<|im_end|>", None)


def _wrapped(
    tokenizer: Tokenizer, chat_template: str | None, adds_bos: bool, bos: str | None, eos: str | None, pad: str | None
) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "<|im_start|>", "<|im_end|>")])
    if adds_bos and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    names = {"bos_token": bos, "eos_token": eos, "pad_token": pad}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{k: v for k, v in names.items() if v is not None})
    wrapped.chat_template = chat_template
    return wrapped
