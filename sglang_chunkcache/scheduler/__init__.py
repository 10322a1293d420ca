"""Exact reuse in the scheduler process: SGLang's radix tree with one node per chunk."""
