"""Attention of the pre-extend passes: `masked_layout` says who may see what, `masked` computes it with torch alone."""
