"""One rank's chunk KV beyond its process:
entries, their names, their manifest, the backend and the thread that uses them."""
