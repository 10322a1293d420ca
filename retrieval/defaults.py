"""Default values of the command line and of the benches. The server's are in `sglang_chunkcache/config.py`."""

K = 5
"""Passages per question, as in CRAFT section 5."""
NPROBE = 128
"""IVF lists visited per search, as in CRAFT section 5."""
CHUNK_TOKENS = 256
"""In the middle of the 128 to 512 that CRAFT gives as typical."""
OVERLAP_TOKENS = 32
TOP_N = 10
"""Neighbours per passage: FusionRAG's figure 7a is above 80% from ten on."""
N_VALUES = range(2, 16)
"""Numbers of neighbours for which FusionRAG's figure 7a is measured again."""
DIM = 512
SEED = 0
FIT_PASSAGES = 100_000
ENCODE_BATCH = 1024
DEVICE_BATCH = 64
BM25_MEMORY_MIB = 256
