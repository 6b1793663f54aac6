"""Text to token ids and back, for whole texts and for a stream, and chat templates."""

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import tokenizers
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxwafer.errors import UserError

# What decoding gives for bytes that are not, or not yet, UTF-8; a character has at most three bytes too few.
REPLACEMENT = "\ufffd"
MAX_MISSING = 3


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """The tokenizer of a checkpoint.

    eos_ids: tokens that end a reply, () where the files name none. bos_id: None where there is none. add_bos: whether a
    plain text begins with it. chat_template: Jinja source, or None. where: the file or folder, for messages.
    """

    inner: tokenizers.Tokenizer
    where: str
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    add_bos: bool = False
    chat_template: str | None = None

    def __post_init__(self):
        # A tokenizer.json may ask for these; a prompt is never cut or padded here.
        self.inner.no_truncation()
        self.inner.no_padding()

    @property
    def vocab_size(self) -> int:
        """Token ids, added tokens included; a model may have more rows than that."""
        return self.inner.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of `text`. special: put BOS in front where `add_bos` says so, as a plain prompt needs.

        A chat template writes its own BOS, so what `apply_chat` returns is encoded without. Special tokens written out
        in the text (`<|im_start|>`) become their single ids in either case.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"the text is not valid Unicode (a lone surrogate at character {error.start})") from None
        ids = self.inner.encode(text, add_special_tokens=False).ids
        return [self.bos_id, *ids] if special and self.add_bos else ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens; bytes that are not UTF-8 become U+FFFD."""
        return self.inner.decode(list(ids), skip_special_tokens=True)

    def stream(self) -> "TextStream":
        """A decoder for one reply, token by token."""
        return TextStream(self)

    def apply_chat(self, messages: Iterable[Mapping], *, add_generation_prompt: bool = True) -> str:
        """The prompt for messages [{"role": "user", "content": "…"}, …]; encode it with `special=False`.

        The template runs in a sandbox. No template, or one that fails or rejects the messages, is a UserError.
        """
        if self.chat_template is None:
            raise UserError(f"{self.where} has no chat template; give a plain prompt instead")
        names = {"bos_token": self.bos_id, "eos_token": self.eos_ids[0] if self.eos_ids else None}
        tokens = {name: self.inner.id_to_token(i) for name, i in names.items() if i is not None}
        try:
            template = _environment().from_string(self.chat_template)
            # Templates ask whether these two are none, which an undefined name is not.
            given = {"messages": list(messages), "tools": None, "documents": None}
            return template.render(**given, add_generation_prompt=add_generation_prompt, **tokens)
        except Exception as error:  # the template is a program from the checkpoint: it may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"the chat template of {self.where} failed: {reason}") from error


class TextStream:
    """Decodes one reply as it grows: all that `push` and `flush` return, joined, is `decode` of all the ids."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._reset()

    def _reset(self) -> None:
        # Ids decoded together: those whose text is out (a decoder may need the token before) and those after them.
        self._ids: list[int] = []
        self._done = 0  # ids whose text is out
        self._sent = 0  # characters of the text of `_ids` that are out

    def push(self, token: int) -> str:
        """The text that became complete with this token; "" while a character lacks bytes."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        whole = len(text)
        while whole > max(self._sent, len(text) - MAX_MISSING) and text[whole - 1] == REPLACEMENT:
            whole -= 1
        new, self._sent = text[self._sent : whole], max(self._sent, whole)
        if new and whole == len(text):
            self._ids = self._ids[self._done :]
            self._done = len(self._ids)
            self._sent = len(self._tokenizer.decode(self._ids))
        return new

    def flush(self) -> str:
        """What is left at the end of the reply: a character that never became complete, as U+FFFD."""
        new = self._tokenizer.decode(self._ids)[self._sent :]
        self._reset()
        return new


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as chat templates on the hub expect it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks a reply for training; the text inside is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)
