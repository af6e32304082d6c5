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

Marked spans are found with private characters printed in place of the markers, and the text without these must be the
template's own; Transformers' `return_assistant_tokens_mask` misplaces the spans of markers inside a Jinja macro.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from surefoot.data.rows import RowError
from surefoot.errors import ModelError

_log = logging.getLogger(__name__)

Message = dict[str, Any]
Span = tuple[int, int]
Templates = str | Mapping[str, str]

_MARKER = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_OPEN, _CLOSE = "\U000f0000", "\U000f0001"
_REJECTED = "refused by the chat template"


def _check_syntax(text: str, where: str) -> None:
    try:
        render_jinja_template([[{"role": "user", "content": "x"}]], chat_template=text)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"{where}: not valid Jinja in line {error.lineno}: {error.message}") from error
    except Exception:  # a template may refuse this one chat; the rows will show
        return


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

    def __init__(self, templates: Templates, variables: Mapping[str, Any], control_tokens: Sequence[str]) -> None:
        self._templates = {"default": templates} if isinstance(templates, str) else dict(templates)
        self._variables = dict(variables)
        self._control_tokens = tuple(token for token in control_tokens if token)
        if "default" not in self._templates:
            raise ModelError(f"expected a chat template named 'default', found {', '.join(self._templates)}")
        for name, text in self._templates.items():
            _check_syntax(text, f"chat template {name!r}")
            if "strftime_now" in text:
                _log.warning("the chat template writes today's date: on another day the same rows give other tokens")
        self._headers = {text: self._probe(text) for text in self._templates.values()}

    def render(self, messages: Sequence[Message], tools: list[Any] | None = None, *, prompt: bool = False) -> str:
        """The chat as text; with `prompt`, and the generation prompt behind it.

        Raises:
            RowError: the template refuses the chat; its own reason is in the message.
        """
        return self._render(self._template(tools), messages, tools, prompt)

    def trained_texts(
        self, messages: Sequence[Message], tools: list[Any] | None, answers: int, *, last_only: bool
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
            return [_cut(text, self._spans(text, messages, tools, turns))]
        except _Unproven:
            if turns == [len(messages) - 1]:
                raise
        texts = []
        for turn in turns:
            upto = messages[: turn + 1]
            text = self.render(upto, tools)
            texts.append(_cut(text, self._spans(text, upto, tools, [turn])))
        return texts

    def _template(self, tools: list[Any] | None) -> str:
        return self._templates["tool_use" if tools and "tool_use" in self._templates else "default"]

    def _render(self, template: str, messages: Sequence[Message], tools: list[Any] | None, prompt: bool) -> str:
        try:
            texts, _ = render_jinja_template(
                [list(messages)], tools=tools, chat_template=template, add_generation_prompt=prompt, **self._variables
            )
        except Exception as error:  # a template is the user's program: whatever it raises is its reason
            roles = ", ".join(message["role"] for message in messages)
            raise RowError(_REJECTED, f"the chat template refuses the turns [{roles}]: {error}") from error
        return str(texts[0])

    def _spans(
        self, text: str, messages: Sequence[Message], tools: list[Any] | None, turns: Sequence[int]
    ) -> list[Span]:
        marks = self._marks(text, messages, tools)
        spans = []
        for turn in turns:
            last = turn == len(messages) - 1
            upto = text if last else self.render(messages[: turn + 1], tools)
            if not text.startswith(upto):
                raise _Unproven(turn, "the template writes it differently once later turns follow")
            start, proven = self._answer_start(upto, messages[:turn], tools, turn)
            inside = [(max(a, start), min(b, len(upto))) for a, b in marks if a < len(upto) and b > start]
            inside = [(a, b) for a, b in inside if text[a:b].strip()]
            if not inside and not proven:
                prompt = self.render(messages[:turn], tools, prompt=True)
                raise _Unproven(turn, f"it does not go on from the generation prompt, which ends in {prompt[-30:]!r}")
            spans += self._with_end(text, inside or [(start, len(upto))], len(upto))
        return spans

    def _answer_start(
        self, upto: str, before: Sequence[Message], tools: list[Any] | None, turn: int
    ) -> tuple[int, bool]:
        """Where the model takes over, and whether that is proven; if not, where the turn begins, header included."""
        prompt = self.render(before, tools, prompt=True)
        if upto.startswith(prompt):
            header = self._headers[self._template(tools)]
            if header is None:
                return len(prompt), prompt != self.render(before, tools)
            if upto.startswith(header, len(prompt)):
                return len(prompt) + len(header), True
            return len(prompt), False
        bare = self.render(before, tools)
        if not upto.startswith(bare):
            raise _Unproven(turn, "the template writes the turns before it differently when it follows")
        return len(bare), False

    def _with_end(self, text: str, spans: list[Span], turn_end: int) -> list[Span]:
        """Take in an end-of-turn token that the markers left out, and leave out the white space behind it."""
        *earlier, (start, end) = spans
        if text[end:turn_end].strip() in self._control_tokens:
            end = turn_end
        body = text[start:end].rstrip()
        return [*earlier, (start, start + len(body) if body.endswith(self._control_tokens) else end)]

    def _marks(self, text: str, messages: Sequence[Message], tools: list[Any] | None) -> list[Span]:
        template = self._template(tools)
        if not _MARKER.search(template):
            return []

        def printed(match: re.Match[str]) -> str:
            return f"{{%{match[1]} print '{_CLOSE if match[2] else _OPEN}' {match[3]}%}}"

        marked = self._render(_MARKER.sub(printed, template), messages, tools, prompt=False)
        if marked.replace(_OPEN, "").replace(_CLOSE, "") != text:
            return []
        marks, start, end = [], 0, 0
        for part in re.split(f"([{_OPEN}{_CLOSE}])", marked):
            if part == _OPEN:
                start = end
            elif part == _CLOSE:
                marks.append((start, end))
            else:
                end += len(part)
        return marks

    def _probe(self, template: str) -> str | None:
        """Try the template on the smallest chat, and warn of what training alone cannot make good.

        Returns:
            What a template without a generation prompt writes before every answer: the part that two different answers
            share. Empty where there is a generation prompt, or nothing but space; `None` where it cannot be known.
        """
        asked = [{"role": "user", "content": "a"}]
        try:
            answered = [
                self._render(template, [*asked, {"role": "assistant", "content": answer}], None, False)
                for answer in ("b", "c")
            ]
            prompt = self._render(template, asked, None, True)
            announced = prompt != self._render(template, asked, None, False)
        except RowError:
            return None
        if not answered[0].rstrip().endswith(self._control_tokens):
            _log.warning("the chat template writes no special token behind an answer: the model may not learn to stop")
        if announced:
            return ""
        if not answered[0].startswith(prompt):
            return None
        same = takewhile(lambda pair: pair[0] == pair[1], zip(*answered, strict=False))
        header = "".join(char for char, _ in same)[len(prompt) :].rstrip(" ")
        if not header.strip():
            return ""
        _log.warning(
            "the chat template has no generation prompt: it writes %r before answers, which is not trained; generation "
            "must put it behind the prompt",
            header,
        )
        return header


def _cut(text: str, spans: list[Span]) -> tuple[str, list[Span]]:
    return text[: spans[-1][1]], spans


class _Unproven(RowError):
    def __init__(self, turn: int, why: str) -> None:
        super().__init__("turn cannot be told apart", f"what to train of message {turn} cannot be told: {why}")
