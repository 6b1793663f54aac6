"""`jaxwafer score`: how likely a text is to the model."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from jaxwafer.checkpoint.open import open_checkpoint
from jaxwafer.cli.run import ModelFlags, load
from jaxwafer.errors import UserError


@dataclass(kw_only=True)
class Score(ModelFlags):
    """Print the mean negative log-likelihood (nats a token) and the perplexity of the start of a text."""

    model: tyro.conf.Positional[str]
    """a name from checkpoints/, a Hugging Face folder, or a GGUF file"""
    file: Path
    """a text file"""
    tokens: int = 512
    """how many tokens from its start; the first is context alone"""
    json: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """write the figures, and every token's log-likelihood, to this file"""

    def run(self) -> None:
        from jaxwafer.cli.decode import write_json

        if self.tokens < 2:
            raise UserError("--tokens must be at least 2")
        try:
            text = self.file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read --file {self.file}: {error}") from None
        checkpoint = open_checkpoint(self.model)
        tokens = checkpoint.tokenizer().encode(text)[: self.tokens]
        if len(tokens) < 2:
            raise UserError(f"{self.file} has fewer than two tokens")
        engine = load(self.model, self, checkpoint, max_context=self.max_context or len(tokens))
        likelihoods = engine.score(tokens)
        mean = -float(np.mean(likelihoods, dtype=np.float64))
        print(f"{len(tokens)} tokens: mean NLL {mean:.4f}, perplexity {math.exp(mean):.3f}")
        if self.json:
            report = {"model": self.model, "tokens": tokens, "nll": mean, "perplexity": math.exp(mean),
                      "log_likelihoods": likelihoods.tolist()}  # fmt: skip
            write_json(self.json, json.loads(json.dumps(report)))
