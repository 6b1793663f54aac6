"""llama.cpp on the same GGUF file, through llama-cpp-python, for `jaxwafer bench --compare llama.cpp`."""

from pathlib import Path

import numpy as np

from jaxwafer.bench.measure import Point, Stopwatch
from jaxwafer.errors import UserError


class LlamaCpp:
    """A context of `point`'s sizes. `run` gives (prefill, decode) tokens/s of all its requests together."""

    def __init__(self, path: Path, point: Point, threads: int):
        try:
            import llama_cpp
        except ImportError:
            raise UserError("--compare llama.cpp needs llama-cpp-python: pip install llama-cpp-python") from None
        self._api, self._point = llama_cpp, point
        self._log = llama_cpp.llama_log_callback(lambda *_: None)  # kept: C calls it
        llama_cpp.llama_log_set(self._log, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise UserError(f"llama.cpp cannot load {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = point.requests * (point.prompt + point.new)
        params.n_batch = params.n_ubatch = max(512, point.requests)
        params.n_seq_max = point.requests
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise UserError(f"llama.cpp cannot make a context of {params.n_ctx} tokens")

    def run(self) -> tuple[float, float]:
        point, api = self._point, self._api
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        prompts = np.random.default_rng(0).integers(0, vocabulary, (point.requests, point.prompt))
        last = np.zeros(point.requests, np.int64)
        with Stopwatch() as prefill:
            for sequence, prompt in enumerate(prompts):
                self._decode([(int(t), n, sequence, n == point.prompt - 1) for n, t in enumerate(prompt)])
                last[sequence] = self._greedy(-1, vocabulary)
        with Stopwatch() as decode:
            for step in range(point.new - 1):
                self._decode([(int(t), point.prompt + step, sequence, True) for sequence, t in enumerate(last)])
                for sequence in range(point.requests):
                    last[sequence] = self._greedy(sequence, vocabulary)
        return prompts.size / prefill.seconds, point.requests * (point.new - 1) / decode.seconds

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """rows: (token, position, sequence, whether its logits are wanted)."""
        api = self._api
        for first in range(0, len(rows), 512):
            part = rows[first : first + 512]
            batch = api.llama_batch_init(len(part), 0, 1)
            batch.n_tokens = len(part)
            for i, (token, position, sequence, wanted) in enumerate(part):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
                batch.seq_id[i][0], batch.logits[i] = sequence, wanted
            status = api.llama_decode(self._context, batch)
            api.llama_batch_free(batch)
            if status:
                raise UserError(f"llama.cpp failed with status {status}")

    def _greedy(self, row: int, vocabulary: int) -> int:
        logits = self._api.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (vocabulary,)).argmax())
