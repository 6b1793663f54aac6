"""Five tasks whose answers can be checked exactly: prompts, answers, and batches of them to train on.

    copy d k a =                d k a
    reverse d k a =             a k d
    sort d k a =                a d k
    modulo d 3 k 5 a 2 =        d 3 3 k 5 1 a 2 3    each number with the sum so far, modulo 7
    recall ba q ce d ? ce       d                    one of the pairs before

Letters of a prompt are distinct, and so are the keys of a recall. A hash of the prompt (of a recall: its pairs) decides
whether it is held out, one in eight; what is drawn for training is never held out. Training has recalls of up to 160
pairs. Held-out ones have up to 48, of which others were asked before, so that up to 320 tokens lie before the question.
"""

from dataclasses import dataclass

import numpy as np

PAD, EOS, UNKNOWN = 0, 1, 2
SPECIAL = ("<pad>", "<eos>", "<unk>")
TASKS = ("copy", "reverse", "sort", "modulo", "recall")
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
MODULUS = 7
DIGITS = tuple(str(n) for n in range(MODULUS))
KEYS = tuple(c + v for c in "bcdfghjklmnpqrstvwxz" for v in ("a", "e", "i", "o", "u", "y", "ai", "ou"))
VOCABULARY = (*SPECIAL, *TASKS, "=", "?", *DIGITS, *LETTERS, *KEYS)
ID = {word: number for number, word in enumerate(VOCABULARY)}

# Smallest and largest sizes: letters, summands, or pairs.
SIZES = {"copy": (2, 15), "reverse": (2, 12), "sort": (2, 12), "modulo": (2, 6), "recall": (4, len(KEYS))}
ASKED_PAIRS, ASKED_CONTEXT = (4, 48), 320
HELD_OUT = 8
SEED = 20  # of the held-out prompts that tests and `jaxwafer decode` take


@dataclass(frozen=True)
class Example:
    """A prompt and its one right answer, as text."""

    task: str
    prompt: str
    answer: str


@dataclass(frozen=True)
class Batch:
    """tokens: int32 [B, T]. targets: int32 [B, T], what should follow each token, PAD where that is not asked."""

    tokens: np.ndarray
    targets: np.ndarray


def held_out(task: str, count: int, seed: int = SEED) -> list[Example]:
    """`count` held-out examples of a task, of all sizes alike."""
    rng = np.random.default_rng([seed, TASKS.index(task)])
    low, high = ASKED_PAIRS if task == "recall" else SIZES[task]
    found = []
    while len(found) < count:
        size = int(rng.integers(low, high + 1))
        prompts, answers = rows(rng, task, 1, size, queries=1, training=False)
        prompt = _after_others(rng, prompts[0], size) if task == "recall" else prompts[0]
        found.append(Example(task, text(prompt), text(answers[0])))
    return found


def _after_others(rng: np.random.Generator, prompt: np.ndarray, size: int) -> np.ndarray:
    """A recall in which some other pairs were asked and answered before its question."""
    pairs, question = prompt[1 : 1 + 2 * size].reshape(size, 2), prompt[-2:]
    others = pairs[pairs[:, 0] != question[1]]
    count = rng.integers(0, (ASKED_CONTEXT - len(prompt)) // 3 + 1)
    answered = others[rng.integers(0, len(others), count)]
    before = np.insert(answered, 0, ID["?"], axis=1).reshape(-1)
    return np.concatenate([prompt[:-2], before, question])


def text(tokens: np.ndarray) -> str:
    return " ".join(VOCABULARY[t] for t in tokens)


def short_batch(rng: np.random.Generator, counts: dict[str, int], width: int, largest: dict[str, int]) -> Batch:
    """`counts` rows of each task but recall, in order; `width` tokens hold the largest of `SIZES`."""
    tokens, targets = (np.full((sum(counts.values()), width), PAD, np.int32) for _ in range(2))
    row = 0
    for task, count in counts.items():
        low, high = SIZES[task]
        sizes = rng.integers(low, min(high, largest[task]) + 1, count)
        for size, number in zip(*np.unique(sizes, return_counts=True), strict=True):
            prompts, answers = rows(rng, task, number, int(size))
            whole = np.concatenate([prompts, answers], axis=1)
            part, start = slice(row, row + number), prompts.shape[1]
            tokens[part, : whole.shape[1]] = whole
            targets[part, start - 1 : whole.shape[1] - 1] = answers
            targets[part, whole.shape[1] - 1] = EOS
            row += number
    return Batch(tokens, targets)


def recall_batch(rng: np.random.Generator, count: int, width: int, pairs: tuple[int, int]) -> Batch:
    """`count` rows of pairs and as many queries with their answers as fit `width` tokens."""
    tokens, targets = (np.full((count, width), PAD, np.int32) for _ in range(2))
    row = 0
    sizes = rng.integers(pairs[0], pairs[1] + 1, count)
    for size, number in zip(*np.unique(sizes, return_counts=True), strict=True):
        queries = (width - 1 - 2 * int(size)) // 3
        prompts, answers = rows(rng, "recall", number, int(size), queries)
        start = 2 + 2 * int(size)
        part, asked = slice(row, row + number), slice(start, start + 3 * queries, 3)
        tokens[part, : prompts.shape[1]] = prompts
        tokens[part, start + 1 : start + 3 * queries : 3] = answers
        targets[part, asked] = answers
        targets[part, start + 1 : start + 3 * queries : 3] = EOS
        row += number
    return Batch(tokens, targets)


def rows(rng: np.random.Generator, task: str, count: int, size: int, queries: int = 1,
         training: bool = True) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Prompts [count, …] and answers [count, …] as tokens, all for training or all held out.

    A recall of several queries is "? key" for each with a place for its value between them; what is held out are the
    pairs, whatever is asked of them.
    """
    found: list[tuple[np.ndarray, np.ndarray]] = []
    have = 0
    while have < count:
        prompts, answers = make(rng, task, 2 * (count - have) + 8, size, queries)
        wanted = is_held_out(prompts[:, : 1 + 2 * size] if task == "recall" else prompts) != training
        found.append((prompts[wanted], answers[wanted]))
        have += int(wanted.sum())
    prompts, answers = (np.concatenate(parts)[:count] for parts in zip(*found, strict=True))
    return prompts, answers


def make(rng: np.random.Generator, task: str, count: int, size: int,
         queries: int) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    head = np.full((count, 1), ID[task])
    if task == "recall":
        keys = ID[KEYS[0]] + _distinct(rng, count, len(KEYS), size)
        values = ID["a"] + rng.integers(0, len(LETTERS), (count, size))
        context = np.stack([keys, values], axis=-1).reshape(count, 2 * size)
        which = rng.integers(0, size, (count, queries))
        asked = np.stack([np.full_like(which, ID["?"]), np.take_along_axis(keys, which, 1),
                          np.full_like(which, PAD)], axis=-1).reshape(count, 3 * queries)  # fmt: skip
        return np.concatenate([head, context, asked[:, :-1]], axis=1), np.take_along_axis(values, which, 1)
    end = np.full((count, 1), ID["="])
    if task == "modulo":
        names = ID["a"] + _distinct(rng, count, len(LETTERS), size)
        # Up to a number of each prompt's own, so that many sums are small.
        numbers = rng.integers(0, rng.integers(2, MODULUS + 1, (count, 1)), (count, size))
        sums = np.cumsum(numbers, axis=1) % MODULUS
        body = np.stack([names, ID["0"] + numbers], axis=-1).reshape(count, 2 * size)
        answers = np.stack([names, ID["0"] + numbers, ID["0"] + sums], axis=-1).reshape(count, 3 * size)
        return np.concatenate([head, body, end], axis=1), answers
    body = ID["a"] + _distinct(rng, count, len(LETTERS), size)
    answers = {"copy": body, "reverse": body[:, ::-1], "sort": np.sort(body, axis=1)}[task]
    return np.concatenate([head, body, end], axis=1), answers


def _distinct(rng: np.random.Generator, count: int, among: int, size: int) -> np.ndarray:
    return rng.random((count, among)).argsort(axis=1)[:, :size]


def is_held_out(prompts: np.ndarray) -> np.ndarray:
    """bool [B] for prompts of tokens [B, T]: their FNV-1a hash (64 bits), mixed as MurmurHash3 ends, modulo 8."""
    value = np.full(len(prompts), 0xCBF29CE484222325, np.uint64)
    for column in prompts.T.astype(np.uint64):
        value = (value ^ column) * np.uint64(0x100000001B3)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        value = (value ^ (value >> np.uint64(33))) * np.uint64(factor)
    return (value >> np.uint64(33)) % np.uint64(HELD_OUT) == 0
