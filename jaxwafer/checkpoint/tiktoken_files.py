"""`tiktoken.model` as Kimi ships it: byte strings and their ranks, of which `tokenizers` makes a byte-level BPE."""

import base64
import binascii
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from jaxwafer.checkpoint.files import read_text
from jaxwafer.errors import UserError

FILE = "tiktoken.model"
# How the program beside the file splits text, by the class in tokenizer_config.json: Kimi's is that of GPT-4o, with
# runs of Han characters by themselves.
UPPER, LOWER = (rf"[{kind}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kind in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
BEFORE, AFTER = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI = (
    r"[\p{Han}]+",
    f"{BEFORE}{UPPER}*{LOWER}+{AFTER}",
    f"{BEFORE}{UPPER}+{LOWER}*{AFTER}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
PATTERNS = {"TikTokenTokenizer": "|".join(KIMI)}


def tokenizer_from_ranks(path: Path, settings: dict[str, Any]) -> tokenizers.Tokenizer:
    """From the file at `path` and the fields of tokenizer_config.json, which names the added tokens and their ids."""
    name = settings.get("tokenizer_class")
    if name not in PATTERNS:
        raise UserError(
            f"{path}: how text is split is only known for the tokenizer_class {', '.join(PATTERNS)}, not {name!r:.60}"
        )
    ranks = _ranks(path)
    added = _added(settings.get("added_tokens_decoder"), path)
    written = {token: _printable(token) for token in ranks}
    vocab = {written[token]: rank for token, rank in ranks.items()}
    for i, (text, _) in added.items():
        if i in range(len(ranks)) or vocab.setdefault(text, i) != i:
            raise UserError(f"{path}: the added token {text!r:.60} with id {i} is a token of the file as well")
    merges = [(written[left], written[right]) for left, right in _merges(ranks)]
    # A word that is a token is taken whole, whatever the merges say.
    inner = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(PATTERNS[name]), behavior="isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    inner.decoder = decoders.ByteLevel()
    for add, wanted in ((inner.add_special_tokens, True), (inner.add_tokens, False)):
        add(
            [
                AddedToken(text, special=wanted, normalized=False)
                for text, special in added.values()
                if special is wanted
            ]
        )
    return inner


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Pairs in the order in which they are joined.

    tiktoken joins the neighbours that make up the token of the lowest rank, whichever two they are, so each way to cut
    a token into two is a merge.
    """
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        known = [cut for cut in cuts if cut[0] in ranks and cut[1] in ranks]
        merges += sorted(known, key=lambda cut: (ranks[cut[0]], ranks[cut[1]]))
    return merges


def _ranks(path: Path) -> dict[bytes, int]:
    """{token: rank}; ranks are the ids 0, 1, …, and every byte is a token."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            text, rank = line.split()
            ranks[base64.b64decode(text, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise UserError(f"{path} is damaged: line {number} is not a token in base64 and its rank") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise UserError(f"{path} is damaged: its {len(ranks)} tokens do not have the ranks 0 to {len(ranks) - 1}")
    if not all(bytes([i]) in ranks for i in range(256)):
        raise UserError(f"{path} is damaged: not every byte is a token")
    return ranks


def _added(value: Any, path: Path) -> dict[int, tuple[str, bool]]:
    """{id: (text, whether it is special, that is, left out of what is decoded)}."""
    added = {}
    for key, token in value.items() if isinstance(value, dict) else ():
        text = token.get("content") if isinstance(token, dict) else None
        if not key.isdecimal() or not isinstance(text, str) or not text:
            raise UserError(
                f"{path.with_name('tokenizer_config.json')}: added token {key!r:.60} has no id or no content"
            )
        added[int(key)] = text, token.get("special") is True
    return added


def _printable(token: bytes) -> str:
    """The characters that stand for bytes in a byte-level vocabulary (GPT-2)."""
    return "".join(CHARACTERS[byte] for byte in token)


def _characters() -> list[str]:
    """Printable bytes stand for themselves, the others for characters from U+0100 on, in order."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in plain else next(spare)) for byte in range(256)]


CHARACTERS = _characters()
