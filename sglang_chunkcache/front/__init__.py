"""The front process: HTTP in, a planned request out, the answer back. Holds no KV."""
