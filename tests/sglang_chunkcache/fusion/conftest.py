"""Nothing here is collected where SGLang or transformers is not installed."""

from importlib.util import find_spec

if not (find_spec("sglang") and find_spec("transformers")):
    collect_ignore_glob = ["test_*.py", "selectors/test_*.py"]
