"""Chat templates: the text of a chat, and which parts of that text the model is to learn.

What is trained of an assistant turn is what the model itself has to write: everything that the template puts after the
generation prompt, the end-of-turn token included. White space behind that token is the template's and is not trained,
and a text ends with its last trained character: nothing that follows could change a loss. Every span is proven by
rendering, never guessed:

1. the text up to a turn, with the generation prompt, must be the beginning of the text that includes the turn, and
   that the beginning of the whole; the turn's span lies between the two ends;
2. inside that span, a template's own `{% generation %}` markers say which parts count. A turn without markers counts as
   a whole, so that markers on the last turn alone leave no turn untrained;
3. where a template writes earlier turns differently once later ones follow (it strips thoughts from the history), the
   chat becomes one text for each trained turn, exactly as the model meets that turn when it generates.

Marked spans are found with a private character printed in place of the markers, and the text without these must be the
template's own; Transformers' `return_assistant_tokens_mask` misplaces the spans of markers inside a Jinja macro.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from surefoot.data.rows import RowError
from surefoot.errors import ModelError

_log = logging.getLogger(__name__)

Message = dict[str, Any]
Span = tuple[int, int]
Tools = list[Any] | None

_MARKER = re.compile(r"\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}")
_PRIVATE, _PRIVATE_TOO = "\U000f0000", "\U000f0001"


def with_system(messages: Sequence[Message], system_prompt: str | None, fold: bool) -> list[Message]:
    """The chat with `system_prompt` in front where it has no system turn; with `fold`, the system turn's text moved to
    the start of the first user turn, an empty line between.

    Raises:
        RowError: there is a system turn to fold and no user turn behind it.
    """
    chat = list(messages)
    if system_prompt is not None and chat[0]["role"] not in ("system", "developer"):
        chat.insert(0, {"role": "system", "content": system_prompt})
    if fold and chat[0]["role"] in ("system", "developer"):
        system, *chat = chat
        if not chat or chat[0]["role"] != "user":
            found = f"a {chat[0]['role']} turn" if chat else "nothing"
            raise RowError("system turn cannot be folded", f"fold_system: expected a user turn next, found {found}")
        chat[0] = {**chat[0], "content": f"{system.get('content', '')}\n\n{chat[0].get('content', '')}"}
    return chat


class ChatTemplate:
    """Renders chats, and marks what is trained in them.

    Args:
        templates: Jinja text, or several by name, of which "tool_use" serves chats with tools and "default" the others.
        variables: what templates may read besides the chat: the special tokens by name, such as `bos_token`.
        control_tokens: texts of the tokenizer's special tokens.

    Raises:
        ModelError: a template is not valid Jinja, or there is no default one.
    """

    def __init__(
        self, templates: str | Mapping[str, str], variables: Mapping[str, Any], control_tokens: Sequence[str]
    ) -> None:
        self._templates = {"default": templates} if isinstance(templates, str) else dict(templates)
        self._variables = dict(variables)
        self._control_tokens = tuple(token for token in control_tokens if token)
        if "default" not in self._templates:
            raise ModelError(f"expected a chat template named 'default', found {', '.join(self._templates)}")
        self._try_out()

    def render(self, messages: Sequence[Message], tools: Tools = None, *, prompt: bool = False) -> str:
        """The chat as text; with `prompt`, and the generation prompt behind it.

        Raises:
            RowError: the template refuses the chat; its own reason is in the message.
        """
        return self._render(self._template(tools), messages, tools, prompt)

    def prompt(self, messages: Sequence[Message], tools: Tools = None) -> str:
        """What a model goes on from when it answers: the chat and the generation prompt, or of a template that has
        none, the header that it writes before any answer.

        Raises:
            RowError: the template refuses the chat, or writes it otherwise when an answer follows.
        """
        text = self.render(messages, tools, prompt=True)
        if text != self.render(messages, tools):
            return text
        try:
            start = self._up_to_an_answer(messages, tools)
        except RowError as error:
            raise RowError("no generation prompt", f"the chat template adds none, and {error.detail}") from error
        if not start.startswith(text.rstrip(" ")):
            how = "the chat template adds none, and writes the turns before an answer differently when it follows"
            raise RowError("no generation prompt", how)
        return start if start[len(text) :].strip() else text

    def after_answer(self, messages: Sequence[Message], turn: int, tools: Tools = None) -> str:
        """What follows the content of an assistant turn when its chat goes on: its end, the later turns and the
        generation prompt, whatever the template makes of the turn itself.

        Raises:
            RowError: the template refuses the chat, or does not show the turn.
        """
        chat = [*messages[:turn], {**messages[turn], "content": _PRIVATE_TOO}, *messages[turn + 1 :]]
        text = self.prompt(chat, tools)
        if _PRIVATE_TOO not in text:
            raise RowError("turn not shown", f"the chat template does not show message {turn}, an assistant turn")
        return text.partition(_PRIVATE_TOO)[2]

    def trained_texts(
        self, messages: Sequence[Message], tools: Tools, answers: int, *, last_only: bool
    ) -> list[tuple[str, list[Span]]]:
        """The chat as one text, or several (see 3. above), each with its trained character spans in order, and cut off
        behind the last of them.

        Args:
            answers: only assistant turns among the last `answers` messages are trained.
            last_only: of these, only the last.

        Returns:
            An empty list when no assistant turn is to be trained.

        Raises:
            RowError: the template refuses the chat, or what is trained in it cannot be proven.
        """
        first = max(len(messages) - answers, 0)  # a folded system turn leaves a chat shorter than it was
        turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
        turns = turns[-1:] if last_only else turns
        if not turns:
            return []
        text = self.render(messages, tools)
        try:
            return [self._trained_text(text, messages, tools, turns)]
        except RowError:
            beginnings = [(messages[: turn + 1], turn) for turn in turns]
            return [self._trained_text(self.render(chat, tools), chat, tools, [turn]) for chat, turn in beginnings]

    def _trained_text(
        self, text: str, messages: Sequence[Message], tools: Tools, turns: Sequence[int]
    ) -> tuple[str, list[Span]]:
        marks = self._marks(text, messages, tools)
        spans: list[Span] = []
        for turn in turns:
            upto = text if turn == len(messages) - 1 else self.render(messages[: turn + 1], tools)
            if not text.startswith(upto):
                raise _unproven(turn, "the template writes it differently once later turns follow")
            start, proven = self._answer_start(upto, messages[: turn + 1], tools)
            inside = [(max(a, start), min(b, len(upto))) for a, b in marks if a < len(upto) and b > start]
            inside = [(a, b) for a, b in inside if text[a:b].strip()]
            if not inside and not proven:
                prompt = self.render(messages[:turn], tools, prompt=True)
                raise _unproven(turn, f"it does not go on from the generation prompt, which ends in {prompt[-30:]!r}")
            spans += self._with_end(text, inside or [(start, len(upto))], len(upto))
        return text[: spans[-1][1]], spans

    def _answer_start(self, upto: str, messages: Sequence[Message], tools: Tools) -> tuple[int, bool]:
        """Where the model takes over in the last turn, and whether that is proven; if not, where the turn begins. A
        template without a generation prompt may write a header before answers, which is no part of them: what comes in
        front of another answer as well, but for spaces."""
        before = messages[:-1]
        bare, prompt = self.render(before, tools), self.render(before, tools, prompt=True)
        if not upto.startswith(prompt):
            if not upto.startswith(bare):
                raise _unproven(len(before), "the template writes the turns before it differently when it follows")
            return len(bare), False
        if prompt != bare:
            return len(prompt), True
        start = self._up_to_an_answer(before, tools)
        if not start[len(prompt) :].strip():
            return len(prompt), True
        return (len(start), True) if upto.startswith(start) else (len(prompt), False)

    def _up_to_an_answer(self, before: Sequence[Message], tools: Tools) -> str:
        """What a template without a generation prompt writes in front of an answer."""
        other = self.render([*before, {"role": "assistant", "content": _PRIVATE}], tools)
        return other.partition(_PRIVATE)[0].rstrip(" ")

    def _with_end(self, text: str, spans: list[Span], turn_end: int) -> list[Span]:
        """Take in an end-of-turn token that the markers left out, and leave out the white space behind it."""
        *earlier, (start, end) = spans
        if text[end:turn_end].strip() in self._control_tokens:
            end = turn_end
        body = text[start:end].rstrip()
        return [*earlier, (start, start + len(body) if body.endswith(self._control_tokens) else end)]

    def _marks(self, text: str, messages: Sequence[Message], tools: Tools) -> list[Span]:
        """The spans between `{% generation %}` and `{% endgeneration %}`."""
        template = self._template(tools)
        if not _MARKER.search(template):
            return []
        printing = _MARKER.sub(rf"{{%\1 print '{_PRIVATE}' \2%}}", template)
        marked = self._render(printing, messages, tools, prompt=False)
        if marked.replace(_PRIVATE, "") != text or marked.count(_PRIVATE) % 2:
            return []
        edges = [match.start() - i for i, match in enumerate(re.finditer(_PRIVATE, marked))]
        return list(zip(edges[::2], edges[1::2], strict=True))

    def _template(self, tools: Tools) -> str:
        return self._templates["tool_use" if tools and "tool_use" in self._templates else "default"]

    def _render(self, template: str, messages: Sequence[Message], tools: Tools, prompt: bool) -> str:
        try:
            texts, _ = render_jinja_template(
                [list(messages)], tools=tools, chat_template=template, add_generation_prompt=prompt, **self._variables
            )
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template is not valid Jinja in line {error.lineno}: {error.message}") from error
        except Exception as error:  # a template is the user's program: whatever it raises is its reason
            roles = ", ".join(message["role"] for message in messages)
            reason = f"the chat template refuses the turns [{roles}]: {error}"
            raise RowError("refused by the chat template", reason) from error
        return str(texts[0])

    def _try_out(self) -> None:
        """Warn of what training alone cannot make good, seen on the smallest chat."""
        if any("strftime_now" in text for text in self._templates.values()):
            _log.warning("the chat template writes today's date: on another day the same rows give other tokens")
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            prompt = self.render(chat[:1], prompt=True)
            ((text, spans),) = self.trained_texts(chat, None, 1, last_only=True)
        except RowError:  # a template may refuse this one chat; the rows will show
            return
        if not text.endswith(self._control_tokens):
            _log.warning("the chat template writes no special token behind an answer: the model may not learn to stop")
        header = text[len(prompt) : spans[0][0]]
        if header.strip() and prompt == self.render(chat[:1]):
            _log.warning(
                "the chat template has no generation prompt: it writes %r before answers, which is not trained, and "
                "which a prompt gets at its end",
                header,
            )


def _unproven(turn: int, why: str) -> RowError:
    return RowError("turn cannot be told apart", f"what to train of message {turn} cannot be told: {why}")
