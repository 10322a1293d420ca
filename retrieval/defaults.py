"""Numbers that nobody has to choose: the command line's and the benches'. The server's are in `sglang_chunkcache/config.py`."""

K = 5
"""Passages for a question, as in CRAFT section 5."""
NPROBE = 128
"""Lists visited, as in CRAFT section 5."""
CHUNK_TOKENS = 256
"""In the middle of the 128 to 512 that CRAFT gives as typical."""
OVERLAP_TOKENS = 32
TOP_N = 10
"""Neighbours of a passage: FusionRAG's figure 7a is above 80% from ten on."""
N_VALUES = range(2, 16)
"""Neighbours for which FusionRAG's figure 7a is repeated."""
DIM = 512
SEED = 0
FIT_PASSAGES = 100_000
ENCODE_BATCH = 1024
DEVICE_BATCH = 64
BM25_MEMORY_MIB = 256
