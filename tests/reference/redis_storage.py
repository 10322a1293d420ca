"""Redis as a HiCache storage, for `dynamic`:
the few commands that it takes, over a socket, without a client library."""

from __future__ import annotations

import socket
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

TIMEOUT_S = 5.0


class RedisStorage(HiCacheStorage):  # type: ignore[misc]
    """`extra_config` has `port`, on this machine.
    Where the server is away it raises; the next call connects anew."""

    def __init__(self, config: Any, kwargs: Any = None) -> None:
        self._port = int(config.extra_config["port"])
        self._socket: socket.socket | None = None

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        found = self._call(b"GET", key.encode())
        return None if found is None else torch.frombuffer(bytearray(found), dtype=torch.uint8)

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        # as HiCache's: nothing is overwritten
        self._call(b"SET", key.encode(), value.numpy().tobytes(), b"NX")
        return True

    def exists(self, key: str) -> bool:
        return bool(self._call(b"EXISTS", key.encode()) == 1)

    def delete(self, key: str) -> None:
        self._call(b"DEL", key.encode())

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> Any:
        raise NotImplementedError

    def batch_set(
        self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        raise NotImplementedError

    def _call(self, *parts: bytes) -> Any:
        try:
            if self._socket is None:
                self._socket = socket.create_connection(("127.0.0.1", self._port), TIMEOUT_S)
            command = b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
            self._socket.sendall(b"*%d\r\n%b" % (len(parts), command))
            with self._socket.makefile("rb") as answers:
                return _answer(answers)
        except OSError:
            self.close()
            raise


def _answer(lines: Any) -> Any:
    line: bytes = lines.readline()
    if not line.endswith(b"\r\n"):
        raise ConnectionError("redis has closed the connection")
    kind, rest = line[:1], line[1:-2]
    if kind == b"-":
        raise ConnectionError(rest.decode())
    if kind == b":":
        return int(rest)
    if kind != b"$":
        return rest
    if int(rest) < 0:
        return None
    data = lines.read(int(rest) + 2)
    if len(data) != int(rest) + 2:
        raise ConnectionError("redis has closed the connection")
    return data[:-2]
