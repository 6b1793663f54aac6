"""`jaxwafer score`: how likely a text is to the model."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tyro

from jaxwafer.checkpoint.open import open_checkpoint
from jaxwafer.cli.run import ModelFlags, OptionalPath, check_writable, load, read_input, write_json
from jaxwafer.errors import UserError
from jaxwafer.model import spec_from_config


@dataclass(kw_only=True)
class Score(ModelFlags):
    """Print the mean negative log-likelihood (nats a token) and the perplexity of the start of a text."""

    model: tyro.conf.Positional[str]
    """a name from checkpoints/, a Hugging Face folder, or a GGUF file"""
    file: Path
    """a text file"""
    tokens: int = 512
    """how many tokens from its start; the first is context alone"""
    json: OptionalPath = None
    """write the figures, and every token's log-likelihood, to this file"""

    def run(self) -> None:
        if self.tokens < 2:
            raise UserError(f"--tokens must be at least 2, not {self.tokens}")
        options = self.options()
        check_writable(self.json)
        text = read_input("--file", self.file)
        checkpoint = open_checkpoint(self.model)
        tokens = checkpoint.tokenizer().encode(text)[: self.tokens]
        if len(tokens) < 2:
            raise UserError(f"{self.file} has fewer than two tokens, so there is nothing to score")
        if self.max_context is None:
            options = replace(options, max_context=spec_from_config(checkpoint.config).max_context)
        if len(tokens) > options.max_context:
            raise UserError(
                f"{len(tokens)} tokens are more than the context of {options.max_context} holds: give fewer --tokens"
            )
        engine = load(checkpoint, replace(options, max_context=len(tokens)))
        likelihoods = engine.score(tokens)
        mean = -float(np.mean(likelihoods, dtype=np.float64))
        # Nothing is as unlikely as a damaged model may make it.
        perplexity = math.exp(mean) if mean < 700 else math.inf
        print(f"{len(tokens)} tokens: mean NLL {mean:.4f}, perplexity {perplexity:.3f}")
        if self.json:
            report = {"model": self.model, "tokens": tokens, "nll": mean, "perplexity": perplexity,
                      "log_likelihoods": likelihoods.tolist()}  # fmt: skip
            write_json(self.json, report)
