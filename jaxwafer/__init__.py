"""Pipelined decoding of large language models on a JAX mesh of wafers and cores."""

__version__ = "0.1.0"
