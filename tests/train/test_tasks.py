"""The tasks: answers against ones worked out here, and what is held out."""

import numpy as np
import pytest

from jaxwafer.train import tasks


def answer(prompt: str) -> str:
    """The right answer, worked out from the text alone."""
    task, *words = prompt.split()
    if task == "recall":
        first = words.index("?")
        pairs = dict(zip(words[:first:2], words[1:first:2], strict=True))
        assert len(pairs) == first // 2
        *others, mark, key = words[first:]
        asked = list(zip(others[::3], others[1::3], others[2::3], strict=True))
        assert mark == "?" and all(m == "?" and pairs[k] == v and k != key for m, k, v in asked)
        return pairs[key]
    assert words.pop() == "="
    if task == "modulo":
        results, total = [], 0
        for name, number in zip(words[::2], words[1::2], strict=True):
            total = (total + int(number)) % 7
            results += [name, number, str(total)]
        return " ".join(results)
    assert len(set(words)) == len(words)
    return " ".join({"copy": words, "reverse": words[::-1], "sort": sorted(words)}[task])


@pytest.mark.parametrize(
    "prompt, expected",
    [
        ("copy d k a =", "d k a"),
        ("reverse d k a =", "a k d"),
        ("sort d k a =", "a d k"),
        ("modulo d 3 k 5 a 2 =", "d 3 3 k 5 1 a 2 3"),
        ("recall ba q ce d ? ce", "d"),
        ("recall ba q ce d ? ba q ? ce", "d"),
    ],
)
def test_the_right_answers_of_the_documentation(prompt, expected):
    assert answer(prompt) == expected
    assert all(word in tasks.ID for word in (prompt + " " + expected).split())


@pytest.mark.parametrize("task", tasks.TASKS)
def test_held_out_prompts_have_right_answers_and_every_size(task):
    found = tasks.held_out(task, 200)
    assert all(example.answer == answer(example.prompt) for example in found)
    assert found == tasks.held_out(task, 200) != tasks.held_out(task, 200, seed=1)
    if task == "recall":
        sizes = [e.prompt.split().index("?") // 2 for e in found]
        low, high = tasks.ASKED_PAIRS
        lengths = [len(e.prompt.split()) for e in found]
        assert 300 < max(lengths) <= tasks.ASKED_CONTEXT and np.mean(np.array(lengths) > 100) > 0.5
    else:
        # Besides the name of the task and "=".
        sizes = [(len(e.prompt.split()) - 2) // (2 if task == "modulo" else 1) for e in found]
        low, high = tasks.SIZES[task]
    assert low <= min(sizes) <= low + 3 and high - 3 <= max(sizes) <= high


def ids(prompt: str) -> np.ndarray:
    return np.array([[tasks.ID[word] for word in prompt.split()]])


def rows_of(batch) -> list[list[str]]:
    """The words of each row up to its padding."""
    return [tasks.text(row[row != tasks.PAD]).split() for row in batch.tokens]


def test_training_never_sees_what_is_held_out():
    rng = np.random.default_rng(3)
    largest = {task: high for task, (_, high) in tasks.SIZES.items()}
    for words in rows_of(tasks.short_batch(rng, dict.fromkeys(tasks.TASKS[:-1], 100), 32, largest)):
        prompt = " ".join(words[: words.index("=") + 1])
        assert not tasks.is_held_out(ids(prompt))[0]
    for words in rows_of(tasks.recall_batch(rng, 50, 64, (4, 20))):
        assert not tasks.is_held_out(ids(" ".join(words[: words.index("?")])))[0]
    for example in tasks.held_out("recall", 20):
        assert tasks.is_held_out(ids(example.prompt.split(" ?", 1)[0]))[0]
    for example in tasks.held_out("sort", 20):
        assert tasks.is_held_out(ids(example.prompt))[0]


def test_an_eighth_is_held_out():
    rng = np.random.default_rng(0)
    prompts, _ = tasks.make(rng, "sort", 20_000, 8, 1)
    # Three standard deviations of a binomial distribution.
    assert abs(tasks.is_held_out(prompts).mean() - 1 / 8) < 3 * np.sqrt(1 / 8 * 7 / 8 / 20_000)


def test_targets_are_the_answers_and_the_end():
    rng = np.random.default_rng(1)
    batch = tasks.short_batch(rng, {"copy": 3, "reverse": 5, "sort": 5, "modulo": 6}, 32, dict.fromkeys(tasks.TASKS, 6))
    for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
        words = tasks.text(tokens[tokens != tasks.PAD]).split()
        start = words.index("=")
        expected = answer(" ".join(words[: start + 1])).split()
        assert words[start + 1 :] == expected
        asked = np.flatnonzero(targets)
        assert tasks.text(targets[asked]).split() == [*expected, "<eos>"]
        assert asked.tolist() == list(range(start, start + len(expected) + 1))


def test_every_query_of_a_recall_asks_for_its_value_and_then_the_end():
    batch = tasks.recall_batch(np.random.default_rng(1), 6, 50, (4, 9))
    for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
        words = tasks.text(tokens[tokens != tasks.PAD]).split()
        first = words.index("?")
        bound = dict(zip(words[1:first:2], words[2:first:2], strict=True))
        assert len(words) > 47 and set(words[first::3]) == {"?"}
        for at in range(first, len(words), 3):
            assert words[at + 2] == bound[words[at + 1]]
            assert tasks.text(targets[at : at + 3]).split() == ["<pad>", words[at + 2], "<eos>"]
        assert not targets[:first].any()
