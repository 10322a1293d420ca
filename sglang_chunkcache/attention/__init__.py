"""Attention of the pre-extend passes: `layout` says who may see what, `masked` computes it with torch alone."""
