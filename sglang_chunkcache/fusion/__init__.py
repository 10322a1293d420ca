"""Fused reuse in the scheduler process: KV moved to another position, partly recomputed."""
