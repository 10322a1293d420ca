"""The bundled model's world, tokenizer, training and evaluation;
figures are in sglang_chunkcache/bundled_model/README.md."""
