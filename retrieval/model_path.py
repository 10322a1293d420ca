"""From the name of a model to what its libraries load: the bundled one, a path, a name on the
Hugging Face hub. Imports nothing heavy.

A misspelt name is refused within seconds; the libraries would try the hub again and again.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from retrieval.errors import RetrievalError, first_line

BUNDLED = "bundled"
"""The model in the package `sglang_chunkcache.bundled_model`, wherever that is installed."""

HUB_TIMEOUT_S = 5.0
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


def find_model(name: str, *, file: str) -> str:
    """What to load for a model's name: a local path, or the name itself if it is on the hub or in
    the hub's local cache.

    Args:
        file: a file of such models, by which it is looked for on the hub.
    Raises:
        RetrievalError: there is no such path, and it is no name of the hub, or the hub does not
            have it or does not answer.
    """
    if name == BUNDLED:
        spec = importlib.util.find_spec("sglang_chunkcache.bundled_model")
        if spec is None or spec.origin is None:
            raise RetrievalError("the bundled model is not installed")
        return str(Path(spec.origin).parent)
    is_elsewhere = ":" in name or os.environ.get("SGLANG_USE_MODELSCOPE")
    if is_elsewhere or name.endswith(".gguf") or Path(name).exists():
        return name  # other places, and files within a model, are the library's business
    if not _HUB_NAME.fullmatch(name) or name.endswith(".json"):
        raise RetrievalError(f"{name!r}: no such file or folder")
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, file), str):
        return name
    here = f"{name!r}: no such file or folder here"
    try:
        get_hf_file_metadata(hf_hub_url(name, file), timeout=HUB_TIMEOUT_S)
    except (errors.GatedRepoError, errors.RemoteEntryNotFoundError):
        return name  # it is there; the library that loads it says what is missing
    except errors.RepositoryNotFoundError:
        what = "no model of this name on the hub that you may read"
        raise RetrievalError(f"{here}, and {what}") from None
    except Exception as error:  # of two libraries, none common
        what = f"the hub does not answer: {first_line(error)}"
        raise RetrievalError(f"{here} nor in the hub's cache, and {what}") from None
    return name
