"""Attention of tokens at scattered positions over the KV pool:
`base` is the contract, README.md the map."""
