"""Rows written into the paged KV cache: api.py is the signature, the other modules are its backends."""
