"""Attention of tokens at scattered positions over the KV pool: see README.md."""
