"""Rows of x, each with the matrix of its own expert: api.py is the signature, the other modules are its backends."""
