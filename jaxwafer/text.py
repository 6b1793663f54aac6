"""Text in, as a prompt's tokens, and out, as it streams: whole characters only, and cut at a stop text."""


def prompt_tokens(tokenizer, text: str, chat: bool) -> list[int]:
    """Tokens of a prompt; with `chat`, where the model has a template, as a user's message that awaits its reply."""
    if chat and tokenizer.chat_template:
        return tokenizer.encode(tokenizer.apply_chat([{"role": "user", "content": text}]))
    return tokenizer.encode(text, special=True)


class TextStream:
    """Text of one request's tokens. Holds back what may yet turn out to begin a stop text.

    decoder: a tokenizer's streaming decoder, with push(token) → text and flush() → text.
    """

    def __init__(self, decoder, stop: tuple[str, ...]):
        self._decoder, self._stop, self._held = decoder, stop, ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that is certain after one more token; "" once a stop text was met."""
        return self._release(self._decoder.push(token))

    def flush(self) -> str:
        """What was held back, at the end of the request."""
        if self.stopped:
            return ""
        text = self._release(self._decoder.flush())
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        self._held += text
        found = [at for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            self.stopped = True
            certain = min(found)
        else:
            certain = len(self._held) - max((_overlap(self._held, s) for s in self._stop), default=0)
        out, self._held = self._held[:certain], self._held[certain:]
        return out


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
