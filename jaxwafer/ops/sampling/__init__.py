"""Sampling and log-probabilities over a vocabulary that is sharded over the whole mesh."""

from jaxwafer.ops.sampling.api import SamplingState, logprob, sample

__all__ = ["SamplingState", "logprob", "sample"]
