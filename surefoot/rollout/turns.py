"""Whether a chat template suits rollouts of several turns, in which nothing that was sampled is written anew."""

from __future__ import annotations

from typing import Any

from surefoot.data.encode import Encoder
from surefoot.data.rows import RowError
from surefoot.errors import ModelError

_SAID = ("b", "<think>\na\n</think>\n\nb")


def check_turns(
    encoder: Encoder, tokenizer: Any, *, role: str | None, tools: list[dict[str, Any]] | None = None
) -> None:
    """Check that a chat goes on token for token as a model has met it: its prompt, what was said, the reply.

    Args:
        encoder: of this tokenizer.
        role: an environment's `reply_role`; with None there is nothing to check.

    Raises:
        ModelError: the template refuses such a chat, or writes earlier turns differently once others follow (it strips
            thoughts from the history), or tokens lie across the end of a turn.
    """
    for said in _SAID if role is not None else ():
        asked, reply = {"role": "user", "content": "a"}, {"role": role, "name": "c", "content": "c"}
        chat = [asked, {"role": "assistant", "content": said}]
        try:
            prompt, whole = encoder.prompt_ids([asked], tools), encoder.prompt_ids([*chat, reply], tools)
            after = encoder.reply_ids(chat, [reply], tools, None)
        except RowError as error:
            raise ModelError(f"conversations of several turns cannot be sampled: {error.detail}") from error
        between = whole[len(prompt) : len(whole) - len(after)]
        spelt = tokenizer.decode(tokenizer.encode(said, add_special_tokens=False))  # as far as it can
        if [*prompt, *between, *after] != whole or tokenizer.decode(between).strip() != spelt.strip():
            found = tokenizer.decode(whole[len(prompt) :])
            raise ModelError(
                f"the chat template writes {found!r} where the model has said {said!r} and a {role} turn follows: in a "
                "conversation of several turns this is not what the model has seen. Set tokenizer.chat_template to one "
                "that leaves earlier turns as they are and ends turns with a token of their own"
            )
