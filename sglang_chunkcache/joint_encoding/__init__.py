"""Joint encoding: similar KV blocks of several requests or chunks become one shared block (Fast
Fusion). Torch only."""
