"""Micro-benchmarks, one file per subject: `python -m eval.bench.tree`.
The last line each prints is one JSON object."""
