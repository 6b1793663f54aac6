"""Building a Tokenizer from what a checkpoint holds: a Hugging Face folder, or the metadata of a GGUF file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jaxwafer.checkpoint.files import read_json, read_text
from jaxwafer.checkpoint.tiktoken_files import FILE, tokenizer_from_ranks
from jaxwafer.checkpoint.tokenizer import Tokenizer
from jaxwafer.errors import UserError

# Tokens that end a turn or a text, in vocabularies where the metadata names only one of them.
END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>")
CONTROL, USER_DEFINED = 3, 4


def tokenizer_from_hub(folder: Path) -> Tokenizer:
    """From tokenizer.json or tiktoken.model, with tokenizer_config.json, chat_template.jinja, generation_config.json
    and config.json."""
    settings, generation, config = (
        read_json(folder / name) if (folder / name).exists() else {}
        for name in ("tokenizer_config.json", "generation_config.json", "config.json")
    )
    inner = _inner(folder, settings)
    bos = _token_id(inner, settings.get("bos_token"))
    ends = [_token_id(inner, settings.get("eos_token"))]
    for fields, name in ((generation, "generation_config.json"), (config, "config.json")):
        ids = fields.get("eos_token_id")
        ends += ids if isinstance(ids, list) else [ids]
        if any(type(i) is not int or not 0 <= i < 2**31 for i in ends if i is not None):
            raise UserError(f"{folder / name}: 'eos_token_id' should be a token id or a list of them, not {ids!r:.60}")
    add_bos = settings.get("add_bos_token")
    if add_bos is None:
        add_bos = bos is not None and inner.encode("", add_special_tokens=True).ids[:1] == [bos]
    template = folder / "chat_template.jinja"
    return Tokenizer(
        inner=inner,
        where=str(folder),
        eos_ids=_unique(ends),
        bos_id=bos,
        add_bos=bool(add_bos) and bos is not None,
        chat_template=read_text(template) if template.exists() else _template(settings.get("chat_template"), folder),
    )


def _inner(folder: Path, settings: dict) -> tokenizers.Tokenizer:
    path, ranks = folder / "tokenizer.json", folder / FILE
    if not path.is_file() and ranks.is_file():
        return tokenizer_from_ranks(ranks, settings)
    if not path.is_file():
        raise UserError(f"{folder} has no tokenizer.json (and no {FILE}); add it from the model's repository")
    text = read_text(path)
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path} is not a tokenizer this version understands ({_line(error)})") from None


def tokenizer_from_gguf(metadata: dict[str, Any], path: Path) -> Tokenizer:
    """From `tokenizer.ggml.*`: byte-level BPE with one of the pre-tokenizers in `PRE_TOKENIZERS`."""
    get = _Metadata(metadata, path).get
    model, pre = get("model", str), get("pre", str, None)
    if model != "gpt2":
        raise UserError(f"{path}: tokenizer model {model!r} is not supported (supported: 'gpt2', byte-level BPE)")
    if pre not in PRE_TOKENIZERS:
        raise UserError(f"{path}: pre-tokenizer {pre!r} is not supported (supported: {', '.join(PRE_TOKENIZERS)})")
    tokens, merges = get("tokens", list), get("merges", list)
    kinds = get("token_type", np.ndarray, np.ones(len(tokens), np.int32))
    if len(kinds) != len(tokens):
        raise UserError(f"{path} is damaged: {len(tokens)} tokens but {len(kinds)} token types")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise UserError(f"{path} is damaged: a token is in the vocabulary twice")
    # The separator is one space; a token never holds one, since bytes are written as printable characters.
    pairs = [tuple(merge.split(" ")) for merge in merges]
    llama = pre == "llama-bpe"
    try:
        # Llama 3's vocabulary is taken whole where a word is in it, whatever the merges say.
        inner = tokenizers.Tokenizer(models.BPE(vocab, pairs, ignore_merges=llama))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path} is damaged: its merges do not fit its tokens ({_line(error)})") from None
    PRE_TOKENIZERS[pre](inner)
    inner.decoder = decoders.ByteLevel()
    special = [AddedToken(tokens[i], special=True, normalized=False) for i in np.flatnonzero(kinds == CONTROL)]
    inner.add_special_tokens(special)
    inner.add_tokens([AddedToken(tokens[i], normalized=False) for i in np.flatnonzero(kinds == USER_DEFINED)])
    bos = get("bos_token_id", int, None)
    ends = [get("eos_token_id", int, None), get("eot_token_id", int, None)]
    for i in (bos, *ends):
        if i is not None and not 0 <= i < len(tokens):
            raise UserError(f"{path} is damaged: special token id {i} of {len(tokens)} tokens")
    controls = {token.content for token in special}
    ends += [vocab[token] for token in END_TOKENS if token in controls]
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        inner=inner,
        where=str(path),
        eos_ids=_unique(ends),
        bos_id=bos,
        add_bos=get("add_bos_token", bool, llama) and bos is not None,
        chat_template=_template(template, path),
    )


class _Metadata:
    def __init__(self, metadata: dict[str, Any], path: Path):
        self.metadata, self.path = metadata, path

    def get(self, name: str, kind: type, default: Any = ...) -> Any:
        value = self.metadata.get(f"tokenizer.ggml.{name}", default)
        if value is ...:
            raise UserError(f"{self.path} holds no tokenizer (no metadata 'tokenizer.ggml.{name}')")
        if value is not default and type(value) is not kind:
            kinds = f"{kind.__name__}, not {type(value).__name__}"
            raise UserError(f"{self.path}: metadata 'tokenizer.ggml.{name}' should be {kinds}")
        return value


def _gpt2(inner: tokenizers.Tokenizer) -> None:
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm(inner: tokenizers.Tokenizer) -> None:
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_])


def _words(digits: str) -> Callable[[tokenizers.Tokenizer], None]:
    """The words of GPT-4's family: contractions, letters, `digits`, punctuation, line ends, spaces."""
    parts = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        digits,
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
    pattern = Regex("|".join(parts))

    def install(inner: tokenizers.Tokenizer) -> None:
        split = pre_tokenizers.Split(pattern, behavior="isolated")
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])

    return install


def _qwen2(inner: tokenizers.Tokenizer) -> None:
    inner.normalizer = normalizers.NFC()
    _words(r"\p{N}")(inner)


# `tokenizer.ggml.pre` → what installs it; "default" is what files without a name of their own say.
PRE_TOKENIZERS: dict[str | None, Callable[[tokenizers.Tokenizer], None]] = {
    "smollm": _smollm,
    "gpt-2": _gpt2,
    "default": _gpt2,
    "llama-bpe": _words(r"\p{N}{1,3}"),
    "qwen2": _qwen2,
}


def _token_id(inner: tokenizers.Tokenizer, token: Any) -> int | None:
    """The id of a token in tokenizer_config.json, which writes it as text or as an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return inner.token_to_id(text) if isinstance(text, str) else None


def _template(value: Any, where: Path) -> str | None:
    """A chat template: text, or a list of named ones of which "default" is meant."""
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        value = next((entry.get("template") for entry in entries if entry.get("name") == "default"), None)
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where}: the chat template should be text, not {type(value).__name__}")
    return value


def _unique(ids: list[int | None]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
