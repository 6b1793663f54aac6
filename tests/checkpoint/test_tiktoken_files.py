"""tiktoken.model as Kimi ships it, against byte-pair encoding by ranks written out here."""

import base64
import json

import pytest
import tokenizers

from jaxwafer.checkpoint.tokenizer_files import tokenizer_from_hub
from jaxwafer.errors import UserError

from .conftest import one_line

TEXT = """The capital of France is Paris, and the answer to the other question isn't known. Tokens were trained on this.
Numbers such as 12345 and 2024 are cut in threes; spaces    of    any    length, and

lines. 北京市是中国的首都，也是政治中心。 中文English混合。 Les élèves étudient à l'école. aaaa aaaaa aaaaaaaa """
WORDS = [
    "The", " capital", " of", " the", "isn't", " don't", "I'LL", "12345", "1234567", "北京市", "中文", "English",
    "混合", " étudient", "e\u0301", "aaaaaaa", "    ", "\n\n", " \n", "。", "🙂", "WORLDly", " x", "ひらがな",
    "\u00a0", "\x00",
]  # fmt: skip
ADDED = {"[BOS]": True, "[EOS]": True, "<|im_end|>": True, "<|im_user|>": True, "<think>": False, "</think>": False}


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """All bytes, then what a trainer joins in TEXT."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=520, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator([TEXT] * 3, trainer)
    byte_of = {}
    for byte in range(256):
        ((text, _),) = inner.pre_tokenizer.pre_tokenize_str(chr(byte)) if byte < 128 else ((None, None),)
        if text:
            byte_of[text] = byte
    # Bytes from 128 on, by the two that write U+0080 … U+07FF and those that begin longer characters.
    for character in [
        *map(chr, range(0x80, 0x800)),
        *map(chr, range(0x1000, 0x10000, 0x1000)),
        "\U00010000",
        "\U00100000",
    ]:
        if not 0xD800 <= ord(character) < 0xE000:
            pieces = "".join(t for t, _ in inner.pre_tokenizer.pre_tokenize_str(character))
            byte_of |= dict(zip(pieces, character.encode(), strict=True))
    vocab = sorted(inner.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(byte_of[c] for c in text) for text, _ in vocab if all(c in byte_of for c in text)]
    singles = [bytes([i]) for i in range(256)]
    return {token: i for i, token in enumerate(singles + [t for t in tokens if len(t) > 1])}


def write(folder, ranks, added=None, **settings):
    lines = (f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items())
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    first = len(ranks)
    decoder = {str(first + 2 * i): {"content": t, "special": s} for i, (t, s) in enumerate((added or ADDED).items())}
    fields = {"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]",
              "added_tokens_decoder": decoder}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [first + 4]}))
    return folder


def encoded(ranks: dict[bytes, int], word: str) -> list[int]:
    """tiktoken's rule: a whole word that is a token; otherwise the leftmost pair of lowest rank is joined, again and
    again."""
    data = word.encode()
    if data in ranks:
        return [ranks[data]]
    parts = [data[i : i + 1] for i in range(len(data))]
    while True:
        pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False)) if a + b in ranks]
        if not pairs:
            return [ranks[part] for part in parts]
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_words_are_joined_by_rank(ranks, tmp_path):
    tokenizer = tokenizer_from_hub(write(tmp_path, ranks))
    assert len(ranks) > 440
    for word in WORDS:
        pieces = [word[a:b] for _, (a, b) in tokenizer.inner.pre_tokenizer.pre_tokenize_str(word)]
        assert tokenizer.encode(word) == [i for piece in pieces for i in encoded(ranks, piece)], word
    for length in range(1, 40):
        assert tokenizer.encode("a" * length) == encoded(ranks, "a" * length)


@pytest.mark.parametrize(
    "text, pieces",
    [
        ("中文English混合", ["中文", "English", "混合"]),
        ("北京市 Pascal", ["北京市", " Pascal"]),
        ("I don't, I'LL go", ["I", " don't", ",", " I'LL", " go"]),
        ("x12345 67", ["x", "123", "45", " ", "67"]),
        ("a  \n\n b", ["a", "  \n\n", " b"]),
        ("HTMLParser camelCase", ["HTMLParser", " camel", "Case"]),
        ("ひらがな한국어", ["ひらがな한국어"]),
    ],
)
def test_text_is_split_as_kimi_does(text, pieces, ranks, tmp_path):
    inner = tokenizer_from_hub(write(tmp_path, ranks)).inner
    got = [text[a:b] for _, (a, b) in inner.pre_tokenizer.pre_tokenize_str(text)]
    # Offsets of the byte-level step are of its own pieces.
    assert got == pieces


def test_every_text_comes_back(ranks, tmp_path):
    tokenizer = tokenizer_from_hub(write(tmp_path, ranks))
    for text in (TEXT, *WORDS):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    stream = tokenizer.stream()
    assert "".join(map(stream.push, tokenizer.encode(TEXT + "🙂"))) + stream.flush() == TEXT + "🙂"


def test_added_tokens_have_their_ids_and_are_never_split(ranks, tmp_path):
    """Ids need not follow on each other. <think> is text in the reply; tokens that are special are left out of it."""
    tokenizer = tokenizer_from_hub(write(tmp_path, ranks))
    first = len(ranks)
    ids = tokenizer.encode("<|im_user|>hm<think>so</think><|im_end|>")
    assert [i for i in ids if i >= first] == [first + 6, first + 8, first + 10, first + 4]
    assert tokenizer.decode(ids) == "hm<think>so</think>"
    assert tokenizer.encode("<think>") == [first + 8] and tokenizer.decode([first + 8]) == "<think>"
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (first, (first + 2, first + 4), False)
    # An id that is nobody's, such as Kimi's reserved ones, is no text.
    assert tokenizer.decode([first + 1]) == ""


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda text: text + "!!! 7\n", "is not a token in base64"),
        (lambda text: text + "YWJjZGVm\n", "is not a token in base64"),
        (lambda text: text.replace(" 300\n", " 9000\n"), "do not have the ranks 0 to"),
        (lambda text: text.replace(text.splitlines()[65], "YWJjZGVm 65"), "not every byte is a token"),
    ],
)
def test_a_damaged_file_says_what_is_wrong(change, says, ranks, tmp_path):
    path = write(tmp_path, ranks) / "tiktoken.model"
    path.write_text(change(path.read_text()))
    with pytest.raises(UserError) as error:
        tokenizer_from_hub(tmp_path)
    assert says in one_line(error) and "tiktoken.model" in str(error.value)


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"tokenizer_class": "OtherTokenizer"}, "'OtherTokenizer'"),
        ({"added_tokens_decoder": {"9": {"content": "<x>"}}}, "'<x>' with id 9"),
        ({"added_tokens_decoder": {"9000": {"content": "A"}}}, "'A' with id 9000"),
        ({"added_tokens_decoder": {"x": {"content": "A"}}}, "added token 'x'"),
        ({"added_tokens_decoder": {"9000": "A"}}, "added token '9000'"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings, says, ranks, tmp_path):
    with pytest.raises(UserError) as error:
        tokenizer_from_hub(write(tmp_path, ranks, **settings))
    assert says in one_line(error)


def test_a_folder_without_either_file_names_both(tmp_path):
    with pytest.raises(UserError, match=r"no tokenizer.json \(and no tiktoken.model\)"):
        tokenizer_from_hub(tmp_path)
