"""Products of each head with its own rows of a matrix: api.py is the signature, the other modules are its backends."""
