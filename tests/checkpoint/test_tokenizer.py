"""Tokenizers from GGUF metadata and from folders: ids, special tokens, streams and chat templates."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxwafer.checkpoint.gguf import GGUFCheckpoint
from jaxwafer.checkpoint.tokenizer import Tokenizer
from jaxwafer.checkpoint.tokenizer_files import tokenizer_from_hub
from jaxwafer.errors import UserError

from .conftest import SPECIAL, TEMPLATE, one_line, vocabulary

CHAT = [{"role": "user", "content": "hello 12"}]
TEXTS = ["hello world", "12 345", "naïve café 日本語 👩‍👩‍👧‍👦", "  two\n\n\tlines ", "", "a\ufffdb"]


@pytest.fixture
def tokenizer(write_gguf):
    """A function that gives the tokenizer of a tiny GGUF file with the metadata changed."""
    return lambda **changes: GGUFCheckpoint(
        write_gguf(metadata={f"tokenizer.ggml.{k}": v for k, v in changes.items()})[0]
    ).tokenizer()


def ids(*tokens: str) -> list[int]:
    return [vocabulary()[0].index(token) for token in tokens]


def test_merges_by_hand(tokenizer):
    # Digits are single before merging, so the merge "1 2" never happens; "Ġw" does.
    assert tokenizer().encode("hello w12") == ids("hello", "Ġw", "1", "2")
    assert tokenizer(pre="gpt-2").encode("hello w12") == ids("hello", "Ġw", "12")


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "default", "llama-bpe", "qwen2"])
@pytest.mark.parametrize("text", TEXTS)
def test_round_trips(tokenizer, pre, text):
    made = tokenizer(pre=pre)
    assert made.decode(made.encode(text)) == text


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("smollm", ["I", "'m", "Ġ", "1", "2", "3", "4", "5", "ĠĠ", "ĠCATS", "'", "S", "!!", "Ċ", "Ċ", "x"]),
        ("gpt-2", ["I", "'m", "Ġ12345", "ĠĠ", "ĠCATS", "'", "S", "!!", "Ċ", "Ċ", "x"]),
        ("llama-bpe", ["I", "'m", "Ġ", "123", "45", "ĠĠ", "ĠCATS", "'S", "!!ĊĊ", "x"]),
        ("qwen2", ["I", "'m", "Ġ", "1", "2", "3", "4", "5", "ĠĠ", "ĠCATS", "'S", "!!ĊĊ", "x"]),
    ],
)
def test_words_of_each_pre_tokenizer(tokenizer, pre, words):
    inner = tokenizer(pre=pre).inner
    split = [word for word, _ in inner.pre_tokenizer.pre_tokenize_str("I'm 12345   CATS'S!!\n\nx")]
    assert split == words


def test_llama_takes_whole_words_from_its_vocabulary(tokenizer):
    # No merges lead to "abc": only a vocabulary that is taken whole knows it.
    tokens, merges = vocabulary()
    made = {pre: tokenizer(pre=pre, tokens=[*tokens, "abc"], token_type=None) for pre in ("llama-bpe", "qwen2")}
    assert {pre: t.encode("abc") for pre, t in made.items()} == {
        "llama-bpe": [len(tokens)],
        "qwen2": ids("a", "b", "c"),
    }


def test_qwen2_composes_characters_first(tokenizer):
    made = tokenizer(pre="qwen2")
    assert made.encode("e\u0301") == made.encode("\u00e9") == ids("Ã", "©")


def test_special_tokens_are_single_ids_and_are_not_shown(tokenizer):
    made = tokenizer()
    assert made.encode("<|im_start|>hello<|im_end|>\n") == ids("<|im_start|>", "hello", "<|im_end|>", "Ċ")
    assert made.decode(ids("<|im_start|>", "hello", "<|im_end|>")) == "hello"
    assert made.eos_ids == tuple(ids("<|im_end|>", "<|endoftext|>")) and made.bos_id == 1


def test_bos_goes_in_front_only_where_asked_and_wanted(tokenizer):
    assert tokenizer().encode("hello", special=True) == ids("hello")
    made = tokenizer(add_bos_token=True)
    assert made.encode("hello", special=True) == [1, *ids("hello")]
    assert made.encode("hello") == ids("hello")
    # Llama 3 wants it where the file does not say.
    assert tokenizer(pre="llama-bpe", add_bos_token=None).add_bos
    assert not tokenizer(add_bos_token=None).add_bos
    assert not tokenizer(add_bos_token=True, bos_token_id=None).add_bos


def test_user_defined_tokens_are_single_ids_and_are_shown(tokenizer):
    tokens, _ = vocabulary()
    made = tokenizer(tokens=[*tokens, "<think>"], token_type=[3] * len(SPECIAL) + [1] * (len(tokens) - 3) + [4])
    assert made.encode("<think>12") == [len(tokens), *ids("1", "2")]
    assert made.decode(made.encode("<think>12")) == "<think>12"


def test_a_lone_surrogate_is_refused(tokenizer):
    with pytest.raises(UserError) as error:
        tokenizer().encode("ab\ud800")
    assert "character 2" in one_line(error)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "llama"}, "tokenizer model 'llama'"),
        ({"model": None}, "no metadata 'tokenizer.ggml.model'"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken'"),
        ({"pre": None}, "pre-tokenizer None"),
        ({"tokens": None}, "no metadata 'tokenizer.ggml.tokens'"),
        ({"tokens": [1, 2]}, "'tokenizer.ggml.tokens' should be list"),
        ({"tokens": ["a", "a"]}, "token types"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "twice"),
        ({"merges": ["a b c"]}, "merges"),
        ({"merges": ["a zz"]}, "merges"),
        ({"eos_token_id": 99999}, "token id 99999"),
        ({"bos_token_id": "x"}, "'tokenizer.ggml.bos_token_id' should be int"),
    ],
)
def test_broken_metadata_says_what_is_wrong(tokenizer, changes, says):
    with pytest.raises(UserError) as error:
        tokenizer(**changes)
    assert says in one_line(error)


def collect(made: Tokenizer, tokens: list[int]) -> list[str]:
    stream = made.stream()
    return [stream.push(t) for t in tokens] + [stream.flush()]


def test_a_stream_gives_whole_characters(tokenizer):
    made = tokenizer()
    pieces = collect(made, made.encode("é👩!"))
    assert pieces == ["", "é", "", "", "", "👩", "!", ""]
    assert collect(made, made.encode("a👩")[:-1]) == ["a", "", "", "", "\ufffd"]


def test_a_stream_can_be_used_again_after_flush(tokenizer):
    made = tokenizer()
    stream = made.stream()
    assert stream.push(made.encode("é")[0]) == "" and stream.flush() == "\ufffd"
    assert stream.push(*made.encode("a")) == "a" and stream.flush() == ""


def test_any_stream_adds_up_to_decode(tokenizer):
    made = tokenizer()
    everything = st.integers(0, made.vocab_size - 1)
    # Bytes above 127 are what makes and breaks characters.
    high = st.sampled_from([i for i in range(made.vocab_size) if ord(made.inner.id_to_token(i)[0]) > 127])

    @settings(max_examples=400, deadline=None)
    @given(st.lists(everything | high, max_size=40))
    def check(tokens):
        assert "".join(collect(made, tokens)) == made.decode(tokens)

    check()


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30))
def test_any_text_streams_without_replacement_characters(text):
    tokens, merges = vocabulary()
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE({t: i for i, t in enumerate(tokens)}, [tuple(m.split()) for m in merges])
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    made = Tokenizer(inner=inner, where="test")
    pieces = collect(made, made.encode(text))
    assert "".join(pieces) == text and pieces[-1].strip("\ufffd") == ""
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def test_a_stream_with_a_decoder_that_strips_the_first_space():
    """Sentencepiece writes a space in front of a word, which a text does not begin with."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁a": 0, "▁b": 1, "<s>": 2}, unk_token="<s>"))
    inner.decoder = tokenizers.decoders.Metaspace()
    inner.add_special_tokens(["<s>"])
    made = Tokenizer(inner=inner, where="test")
    assert collect(made, [2, 0, 1, 2, 1, 0]) == ["", "a", " b", "", " b", " a", ""]


def test_a_chat_by_hand(tokenizer):
    made = tokenizer()
    prompt = made.apply_chat(CHAT)
    assert prompt == "<|im_start|>user\nhello 12<|im_end|>\n<|im_start|>assistant\n"
    assert made.apply_chat(CHAT, add_generation_prompt=False) == "<|im_start|>user\nhello 12<|im_end|>\n"
    encoded = made.encode(prompt)
    assert encoded.count(1) == 2 and encoded.count(2) == 1 and encoded[0] == 1


def with_template(template: str | None, **kwargs) -> Tokenizer:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    return Tokenizer(inner=inner, where="the model", chat_template=template, **kwargs)


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("{{ bos_token }}|{{ eos_token }}", "<s>|</s>"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "hello 12"}'),
        ("{{ '<é>' | tojson }}", '"<é>"'),
        ("{% if tools is none and documents is none %}\n  none\n    {% endif %}", "  none\n"),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hello 12"),
        ("{{ strftime_now('%%') }}", "%"),
    ],
)
def test_what_templates_on_the_hub_use(template, rendered):
    assert with_template(template, bos_id=0, eos_ids=(1,)).apply_chat(CHAT) == rendered


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{% if %}", "failed"),
        ("{{ messages[5].content }}", "failed"),
        ("{{ 1 + messages[0].content }}", "failed"),
        ("{{ messages.append(1) }}", "failed"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "failed"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "failed"),
    ],
)
def test_a_template_that_fails_says_so(template, says):
    with pytest.raises(UserError) as error:
        with_template(template).apply_chat(CHAT)
    assert says in one_line(error) and "the model" in str(error.value)


@pytest.fixture
def hub(tmp_path):
    """A function that writes a folder with a tokenizer and the given files, and returns it."""

    def write(**files):
        tokens, merges = vocabulary()
        inner = tokenizers.Tokenizer(
            tokenizers.models.BPE({t: i for i, t in enumerate(tokens)}, [tuple(m.split()) for m in merges])
        )
        inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = tokenizers.decoders.ByteLevel()
        inner.add_special_tokens(SPECIAL)
        if files.pop("template_processing", False):
            inner.post_processor = tokenizers.processors.TemplateProcessing(
                single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
            )
        inner.enable_truncation(2)
        inner.save(str(tmp_path / "tokenizer.json"))
        for name, value in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(value))
        return tmp_path

    return write


def test_a_folder(hub):
    settings = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    folder = hub(tokenizer_config=settings, generation_config={"eos_token_id": [0, 2]}, config={"eos_token_id": 0})
    made = tokenizer_from_hub(folder)
    assert (made.eos_ids, made.bos_id, made.add_bos) == ((2, 0), 1, False)
    assert made.encode("hello w12", special=True) == ids("hello", "Ġw", "12")
    assert made.apply_chat(CHAT).startswith("<|im_start|>user\nhello 12")
    (folder / "chat_template.jinja").write_text("from the file")
    assert tokenizer_from_hub(folder).apply_chat(CHAT) == "from the file"


def test_a_folder_that_names_its_templates(hub):
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert tokenizer_from_hub(hub(tokenizer_config={"chat_template": named})).apply_chat(CHAT) == "yes"


@pytest.mark.parametrize(
    ("settings", "processing", "add_bos"),
    [
        ({"bos_token": "<|im_start|>"}, True, True),
        ({"bos_token": "<|im_start|>"}, False, False),
        ({"bos_token": "<|im_start|>", "add_bos_token": True}, False, True),
        ({"bos_token": "<|im_start|>", "add_bos_token": False}, True, False),
        ({"add_bos_token": True}, True, False),
    ],
)
def test_whether_a_folder_wants_bos(hub, settings, processing, add_bos):
    made = tokenizer_from_hub(hub(tokenizer_config=settings, template_processing=processing))
    assert made.add_bos is add_bos
    assert made.encode("hello", special=True) == ([1] if add_bos else []) + ids("hello")


def test_a_folder_with_tokenizer_json_alone(hub):
    made = tokenizer_from_hub(hub())
    assert (made.eos_ids, made.bos_id, made.add_bos, made.chat_template) == ((), None, False, None)


def test_a_broken_folder_says_what_is_wrong(hub, tmp_path):
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        tokenizer_from_hub(tmp_path)
    for files, says in (
        ({"generation_config": {"eos_token_id": "x"}}, "generation_config.json"),
        ({"tokenizer_config": []}, "tokenizer_config.json"),
        ({"tokenizer_config": {"chat_template": 3}}, "chat template"),
    ):
        with pytest.raises(UserError) as error:
            tokenizer_from_hub(hub(**({"tokenizer_config": {}, "generation_config": {}} | files)))
        assert says in one_line(error)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Mystery"}}')
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer"):
        tokenizer_from_hub(tmp_path)


def test_the_real_tokenizer(smollm2):
    made = GGUFCheckpoint(smollm2).tokenizer()
    assert (made.eos_ids, made.bos_id, made.add_bos, made.vocab_size) == ((2, 0), 1, False, 49152)
    for text in TEXTS:
        encoded = made.encode(text)
        assert made.decode(encoded) == text and "".join(collect(made, encoded)) == text
    # Digits stand alone: each of them is one token whatever is beside it.
    assert made.encode("2024") == [made.inner.token_to_id(digit) for digit in "2024"]
    prompt = made.apply_chat(CHAT)
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhello 12<|im_end|>\n<|im_start|>assistant\n"
    )
    encoded = made.encode(prompt)
    assert encoded.count(1) == 3 and encoded.count(2) == 2
    assert made.inner.decode(encoded, skip_special_tokens=False) == prompt
