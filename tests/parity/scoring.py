"""Log-probabilities of chosen tokens at every position, out of the engine's own scoring program."""

import numpy as np

from jaxwafer.engine import Engine
from jaxwafer.pipeline.queue import Request, Sampling, chunks_of


def log_probabilities(machine: Engine, tokens: list[int], ids: np.ndarray) -> np.ndarray:
    """float32 [T, N]: how likely ids[t, n] is to follow tokens[: t + 1]; the T tokens must fit one chunk.

    `Engine.score` knows one target a position; here the prompt runs N times, once for each column of `ids`. The copies
    share their cache blocks and their slot, and write the same values to them.
    """
    sizes, count = machine.programs.sizes, ids.shape[1]
    request = Request(0, "", np.array(tokens, np.int32), Sampling(max_new_tokens=1))
    assert machine.queue.claim(request)
    length = sizes.chunk_tokens[-1]
    ((chunks, _, _),) = chunks_of([request] * sizes.chunks, sizes, length)
    columns = []
    for first in range(0, count, sizes.chunks):
        part = ids[:, first : first + sizes.chunks].T
        targets = np.zeros_like(chunks.tokens)
        targets[: len(part), : len(tokens)] = part
        inputs = machine.programs.put((chunks.replace(targets=targets), np.int32(len(part))))
        machine._cache, result = machine.programs.score(length)(
            machine.weights, machine.programs.tables, machine._cache, *inputs
        )
        columns.append(np.asarray(result)[: len(part), : len(tokens)].T)
    machine.queue.finish(request, "length")
    return np.concatenate(columns, axis=1)
