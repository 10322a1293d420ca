"""Nothing here is collected where SGLang is not installed."""

from importlib.util import find_spec

if not find_spec("sglang"):
    collect_ignore_glob = ["test_*.py"]
