"""How much of the bundled model's KV joint encoding saves, predicted and measured; no server."""
