"""Rows of a quantised table: api.py is the signature, the other modules are its backends."""
