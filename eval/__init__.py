"""Evaluation: `python -m eval COMMAND`.
Write `from eval.x import y`, never `import eval`, which hides the builtin."""
