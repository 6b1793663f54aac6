"""Streaming text that ends at a stop text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxwafer.text import TextStream, prompt_tokens


class Pieces:
    """A decoder whose tokens are numbers of pieces of text; `tail` comes at the flush."""

    def __init__(self, pieces, tail=""):
        self.pieces, self.tail = pieces, tail

    def push(self, token: int) -> str:
        return self.pieces[token]

    def flush(self) -> str:
        return self.tail


def stream(pieces, *stop: str, tail: str = "") -> tuple[list[str], bool]:
    """The text after each piece, and at the end; and whether a stop text was met."""
    text = TextStream(Pieces(pieces, tail), stop)
    return [*(text.push(i) for i in range(len(pieces))), text.flush()], text.stopped


@pytest.mark.parametrize(
    "pieces, stop, texts, stopped",
    [
        (["a", "b"], (), ["a", "b", ""], False),
        (["one END two"], ("END",), ["one ", ""], True),
        # Across tokens: what may begin the stop text is held back until it is certain.
        (["one E", "N", "D two", "!"], ("END",), ["one ", "", "", "", ""], True),
        (["one E", "N", "C"], ("END",), ["one ", "", "ENC", ""], False),
        # Held back to the end of the request, then let go.
        (["one EN"], ("END",), ["one ", "EN"], False),
        # A prefix that begins anew inside itself.
        (["aaa", "b"], ("aab",), ["a", "", ""], True),
        (["aab", "aaa", "c"], ("aaac",), ["aab", "", "", ""], True),
        (["abab", "abc", "d"], ("ababc",), ["", "ab", "", ""], True),
        # The first of several in the text, whichever was named first.
        (["x<b>y<a>"], ("<a>", "<b>"), ["x", ""], True),
        (["ab"], ("abc", "b"), ["a", ""], True),
        (["ab", "c"], ("abcd", "bx"), ["", "", "abc"], False),
        # The stop text alone, and nothing after it.
        (["END"], ("END",), ["", ""], True),
        (["", "E", "", "ND"], ("END",), ["", "", "", "", ""], True),
    ],
)
def test_text_is_held_back_as_long_as_it_may_begin_a_stop_text(pieces, stop, texts, stopped):
    assert stream(pieces, *stop) == (texts, stopped)


def test_what_the_decoder_holds_back_comes_at_the_flush_and_may_complete_a_stop_text():
    assert stream(["one E"], "END", tail="X") == (["one ", "EX"], False)
    assert stream(["one EN"], "END", tail="D") == (["one ", ""], True)


@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_the_joined_text_is_the_text_up_to_the_first_stop_text(pieces, stop):
    texts, stopped = stream(pieces, *stop)
    whole, found = "".join(pieces), []
    # A token at a time, as the stream sees it: the earliest stop text in the first prefix that holds any.
    for end in range(1, len(pieces) + 1):
        found = [at for s in stop if (at := "".join(pieces[:end]).find(s)) >= 0]
        if found:
            break
    assert "".join(texts) == (whole[: min(found)] if found else whole)
    assert stopped == bool(found)


class Template:
    chat_template = "yes"

    def encode(self, text: str, *, special: bool = False) -> list:
        return [text, special]

    def apply_chat(self, messages) -> str:
        return f"<{messages}>"


def test_a_chat_prompt_is_the_users_message_and_a_plain_one_begins_the_text():
    tokenizer = Template()
    assert prompt_tokens(tokenizer, "Hi", True) == ["<[{'role': 'user', 'content': 'Hi'}]>", False]
    assert prompt_tokens(tokenizer, "Hi", False) == ["Hi", True]
    tokenizer.chat_template = None
    assert prompt_tokens(tokenizer, "Hi", True) == ["Hi", True]
