"""How often each chunk was retrieved by the last W requests (CRAFT 4.1, "Chunk-Access Table").

It knows ids and counts, no tree and no order. A request costs O(its chunks and those of the request
that leaves the window).
"""

from array import array
from collections import deque
from collections.abc import Hashable, Iterable

from radix_ext.chunk import ChunkId
from radix_ext.errors import check_at_least


class AccessTable:
    """Counts over a sliding window of `window` requests. A chunk counts once per request however
    often it is in it.

    Ids are kept as Python's own 61-bit string hashes, 8 bytes in the window where a string would
    take 81. Should two chunks ever share one, they share a count: an order may suffer, an answer
    never.

    Raises:
        LimitError: window < 1.
    """

    def __init__(self, window: int) -> None:
        check_at_least("window", window, 1)
        self.window = window
        self._counts: dict[int, int] = {}
        self._requests: deque[array[int]] = deque()
        # Counted along: `TenantTables` asks for `num_entries` twice a request.
        self._num_ids = 0

    def observe(self, ids: Iterable[Hashable]) -> None:
        """Count one request; the one that thereby leaves the window is taken off."""
        request = array("q", list({hash(chunk) for chunk in ids}))  # from a list: exactly its size
        for key in request:
            self._counts[key] = self._counts.get(key, 0) + 1
        self._requests.append(request)
        self._num_ids += len(request)
        if len(self._requests) > self.window:
            self._forget(self._requests.popleft())

    def count(self, chunk: Hashable) -> int:
        """Requests in the window that retrieved this chunk."""
        return self._counts.get(hash(chunk), 0)

    def promoted_run(self, ids: Iterable[ChunkId], threshold: int) -> int:
        """Longest leading run whose chunks all count `threshold` or more (CRAFT 4.2)."""
        length = 0
        for chunk in ids:
            if self.count(chunk) < threshold:
                break
            length += 1
        return length

    def frequent(self, ids: Iterable[ChunkId], threshold: int) -> frozenset[int]:
        """Indices of those that count `threshold` or more: they have earned a place in a store."""
        return frozenset(index for index, chunk in enumerate(ids) if self.count(chunk) >= threshold)

    @property
    def num_entries(self) -> int:
        """Requests and ids in the window: what the table takes to keep."""
        return len(self._requests) + self._num_ids

    def __len__(self) -> int:
        """Distinct chunks in the window."""
        return len(self._counts)

    def _forget(self, request: "array[int]") -> None:
        self._num_ids -= len(request)
        for key in request:
            # A count of 0 would keep an entry of every chunk that was ever retrieved.
            if self._counts[key] == 1:
                del self._counts[key]
            else:
                self._counts[key] -= 1
