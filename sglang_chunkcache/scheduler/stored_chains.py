"""Exact chains below host memory (CRAFT 4.1): what host memory has is written to the rank's
storage, and comes back to it.

    a chunk was copied to host memory ──► it is written, or is with its next request
        if the queue is full
    an arriving request's chain goes on in the storage ──► loads ──► host memory ──► device,
        at the request's admission
    a start ──► the chains that are to leave last ──► host memory, and the front knows them

KV goes back to the place that it comes from, so it is named by all that it depends on: model and
weights, tenant, all tokens up to its end, and what has computed it (`how`). A node is claimed in
host memory before it is loaded.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import sglang
import torch

from radix_ext import ChainId, ChunkId, root_chain, text_before
from radix_ext.exact_chains import ChainPlace
from radix_ext.loading import loading_pays
from radix_ext.variants import Variant
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.scheduler.chunk_key import ChunkKey
from sglang_chunkcache.scheduler.host_chains import HostChains
from sglang_chunkcache.scheduler.host_nodes import (
    KEY_BYTES,
    below,
    chain_of,
    chunk_areas,
    chunks_to,
    head_of,
    root,
    text_key,
)
from sglang_chunkcache.scheduler.node import ChunkIdentity, HostNode, facts, state
from sglang_chunkcache.storage.entry import Entry
from sglang_chunkcache.storage.fingerprint import fingerprint
from sglang_chunkcache.storage.key import Place
from sglang_chunkcache.storage.manifest import Row
from sglang_chunkcache.storage.naming import POSITIONED
from sglang_chunkcache.storage.storage import START_S, Storage
from sglang_chunkcache.storage.waits import PendingLoads
from sglang_chunkcache.wire.spans import RequestSpans

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.radix_cache import TreeNode


class _Link(NamedTuple):
    """A chain up to one of its nodes."""

    chain_key: bytes
    parent: bytes | None  # the chain key before it
    place: Place  # in the storage. Of the tokens before the first chunk: `chain_key` as their chunk
    identity: ChunkIdentity  # in host memory, where those tokens have no chunk
    is_empty: bool  # the prompt begins with a chunk, and this is what precedes it
    above: ChainId  # as in host memory
    start: int = 0  # in a request: slots before it, slots and tokens up to its end
    end: int = 0
    stop: int = 0


class StoredChains:
    """Of one rank.

    Args:
        how: what their bits depend on beside model, weights and tokens.
        fingerprint: of the weights, when called. None: somebody else starts the storage.
    """

    def __init__(
        self,
        host: HostChains,
        storage: Storage,
        *,
        how: tuple[str, ...],
        fingerprint: Callable[[], int] | None,
    ) -> None:
        self._nodes, self._tree, self._pricing = host.nodes, host.tree, host.pricing
        self.storage, self._fingerprint = storage, fingerprint
        self._how = blake2b("\0".join(how).encode(), digest_size=8).hexdigest()
        storage.naming.keeps(POSITIONED, storage.layout)
        self._is_starting = False
        self.reset()

    def reset(self) -> None:
        """Host memory is empty, and the weights may have changed."""
        if self._fingerprint is not None:
            self.storage.start(self._fingerprint())

    def arrived(self, req: Req, key: ChunkKey, spans: RequestSpans) -> None:
        """The request waits from now on: load what goes on from where host memory ends."""
        if state(req).chain is not None or spans.is_preprocessing or spans.is_audit:
            return
        tenant = req.extra_key, req.cache_salt
        asked = PendingLoads(is_prefetch=state(req).is_prefetch, tenant=tenant)
        state(req).chain = asked
        with self.storage.guard("nothing is loaded, the prompt is computed"):
            self.storage.poll(is_round=True)
            if self.storage.is_off or self.storage.loader.is_paused:
                return
            links = self._links(key, spans)
            found = [*map(self._find, links)]  # once: a long conversation has many
            if not asked.is_prefetch:
                is_request = self._fingerprint is not None  # else the fuser counts it
                chunks = (each.place.index_key for each in links if not each.is_empty)
                self.storage.ask(chunks, is_request=is_request)
                self._use(links, found)
            unknown = {
                each.place.pointed_from[0]: each.end - each.start
                for each, variant in zip(links, found, strict=True)
                if not (each.is_empty or variant or self._nodes.get(each.chain_key))
            }
            self._load(links, key, asked)
            self.storage.others.look_up(unknown, partial(self._load, links, key, asked), asked)
            if asked.loads or asked.lookup is not None:
                asked.end = end = links[-1].end
                if asked.lookup is not None:  # all of it may be there
                    path = self._tree.path(key.part(0, links[-1].stop))
                    cached = sum(len(node.key) for node in path)
                    asked.saved_s = self._saved_s(cached, end)

    def stored(self, key: ChunkKey, spans: RequestSpans) -> tuple[int, bool]:
        """(slots that the storage would fill behind host memory and device,
        whether to load them is estimated to pay). Asks nobody."""
        if self.storage.is_off:
            return 0, True
        missing, start = self._missing(self._links(key, spans), key)
        return (missing[-1].end - start, self._is_faster(missing, start)) if missing else (0, True)

    def planned(self, req: Req) -> None:
        """The request is admitted: what has not come by now is computed."""
        self.storage.poll()
        self.storage.waits.planned(state(req).chain)

    def saved(self, host: HostNode, node: TreeNode) -> None:
        """The node was copied to host memory: write it, behind what precedes it."""
        path, known = chunks_to(node), facts(node)
        assert known.chunk is not None
        chunks, tenant = (*known.prefix, known.chunk), (node.key.extra_key, node.key.cache_salt)
        first, num_before = head_of(path[0])[0], len(chunks) - len(path)
        with self.storage.guard("a chain is not written to the storage"):
            for link in self._chain(first, known.head, chunks, tenant, num_before):
                if not (link.is_empty or self._find(link) or self._write(link)):
                    break

    def load_most_used(self, seconds: float = START_S) -> int:
        """As `StorageTier.load_most_used`, with chains and host memory."""
        mine = self.storage.naming.chunk(POSITIONED, None, None, ChunkId(""))[:2]
        held = (each for each in self.storage.index.held if each.blob.row.place[:2] == mine)
        found = [each for each in held if each.blob.row.place.exact.endswith(self._how)]
        found.sort(key=lambda variant: (variant.priority, variant.last_used), reverse=True)
        before = self.storage.loader.worker.num_loaded

        def load(link: _Link) -> bool:
            variant = self._find(link)
            if variant is not None and variant.blob.row.num_tokens > self._nodes.pool.num_free:
                return False
            self._claim(link, None)
            return True

        self._is_starting = True
        self.storage.fill(
            (partial(load, link) for each in found for link in self._links_of(each)), seconds
        )
        self._is_starting = False
        return self.storage.loader.worker.num_loaded - before

    def _links(self, key: ChunkKey, spans: RequestSpans) -> list[_Link]:
        """As far as host memory keeps it."""
        tenant, page = (key.extra_key, key.cache_salt), self._tree.page_size
        chunks = [span.chunk for span in key.spans]
        heads = text_before(spans.namespace, key.spans, key.token_ids)
        links, num_before = list[_Link](), 0
        for area, text_start in chunk_areas(key.spans):
            before_it = links[-1].chain_key if links else None
            first = text_key(key, text_start, area[0].start, before_it)
            num_now = num_before + len(area)
            found = self._chain(first, heads[num_before], chunks[:num_now], tenant, num_before)
            stops = [area[0].start, *(span.end for span in area)]
            for link, stop in zip(found, stops, strict=True):
                before = links[-1] if links else None
                link = link._replace(
                    parent=link.parent or before_it,
                    start=before.end if before else 0,
                    end=stop - stop % page,
                    stop=stop,
                )
                links.append(link)
            num_before = num_now
        return links

    def _chain(
        self,
        first: bytes,
        namespace: str,
        chunks: Sequence[ChunkId],
        tenant: tuple[str | None, str | None],
        num_before: int = 0,
    ) -> Iterator[_Link]:
        """From the tokens before an area's first chunk on, which has so many `chunks` before it."""
        key, parent, is_empty = first, None, first == root(array("q"), *tenant)
        # all hexadecimal: so another release reads it, and finds nothing
        area = f"{first.hex()}{num_before:04x}" if num_before else first.hex()
        for number, chunk in enumerate((ChunkId(""), *chunks[num_before:])):
            if number:
                key, parent = below(key, chunk), key
            stored = self.storage.naming.chunk(POSITIONED, *tenant, chunk or ChunkId(key.hex()))
            prefix = tuple(chunks[: num_before + number - 1] if number else ())
            place = Place(*stored, namespace, prefix, False, f"{key.hex()} {area} {self._how}")
            identity = ChunkIdentity(chunk, *tenant)
            above = root_chain(first.hex()) if num_before else chain_of(namespace, prefix)
            yield _Link(key, parent, place, identity, is_empty and not number, above)

    def _use(self, links: Sequence[_Link], variants: Sequence[Variant | None]) -> None:
        """Count a use of what the storage has without a gap, and write what goes on in host memory.
        The end first: of nodes that were used alike the index loses the least recent one."""
        known = zip(links, variants, strict=True)
        found = [each for link, each in takewhile(lambda pair: pair[0].is_empty or pair[1], known)]
        for variant in filter(None, reversed(found)):
            self.storage.use(variant)
        for link in links[len(found) :]:
            if not self._write(link):
                break

    def _write(self, link: _Link) -> bool:
        """Whether it is being written: what would leave for it is asked for less often, or chains
        would replace each other without end."""
        host = self._nodes.get(link.chain_key)
        if host is None or not host.is_here:
            return False
        name = self.storage.names.entry(link.place, 0, False, ())
        row = Row(name, link.place, host.blob.num_tokens, 0, 0, False, start=host.start)
        if name in self.storage.under_way:
            return True
        if not self.storage.writes.gains(link.place, host.blob.num_tokens):
            return False
        read = host.blob.reader()
        host.blob.hold()
        is_written = self.storage.writes.write(row, lambda: Entry(read()), host.blob.let_go)
        if not is_written:
            host.blob.let_go()
        return is_written

    def _find(self, link: _Link) -> Variant | None:
        found = self.storage.index.get(*link.place.index_key)
        is_same = found is not None and found.blob.row.place.exact == link.place.exact
        return found if is_same else None

    def _load(self, links: Sequence[_Link], key: ChunkKey, asked: PendingLoads) -> None:
        """Load what is missing, where that pays. What was never tried is."""
        asked.take_rest()
        missing, start = self._missing(links, key)
        if not missing:
            return
        asked.saved_s = self._saved_s(start, missing[-1].end)
        is_tried = self.storage.tries(pays=self._is_faster(missing, start))
        begun = takewhile(bool, (self._claim(link, key, asked) for link in missing if is_tried))
        if is_tried and (left := missing[sum(begun) :]):
            sizes = [variant.blob.row.num_bytes for variant in filter(None, map(self._find, left))]
            self.storage.goes_on(asked, partial(self._load, links, key, asked), sizes)
        if asked.is_planned:
            self.storage.waits.planned(asked)

    def _missing(self, links: Sequence[_Link], key: ChunkKey) -> tuple[Sequence[_Link], int]:
        """(what neither device nor host memory has, up to what the storage has not, either; how
        many slots precede what would be computed of it). What is on its way is missing, too."""
        missing, path = list[_Link](), self._tree.path(key.part(0, links[-1].stop)) if links else []
        cached = sum(len(node.key) for node in path)
        stop = sum(node.key.num_tokens for node in path)
        for link in links:
            host = self._nodes.get(link.chain_key)
            if link.stop <= stop or (host is not None and host.is_here):
                continue
            if not (link.is_empty or self._find(link)):
                break
            missing.append(link)
        return missing, max(cached, missing[0].start) if missing else 0

    def _is_faster(self, links: Sequence[_Link], start: int) -> bool:
        """Whether loading them is estimated to take no longer than computing from `start` on."""
        variants, load_s = filter(None, map(self._find, links)), self.storage.waits.times.seconds
        loaded = sum(load_s(variant.blob.row.num_bytes) or 0.0 for variant in variants)
        computed, copied = self._pricing.times(start, links[-1].end)
        return loading_pays(loaded and loaded + copied, computed)

    def _saved_s(self, start: int, end: int) -> float:
        computed, copied = self._pricing.times(start, end)
        return max(0.0, computed - copied)

    def _claim(self, link: _Link, key: ChunkKey | None, asked: PendingLoads | None = None) -> bool:
        """Begin to load a node, unless it is here. False: no room, or too much is under way."""
        variant = self._find(link)
        if link.is_empty:
            return True
        if self._nodes.get(link.chain_key) is not None:
            if variant is not None:
                self.storage.join(variant, asked)
            return True
        if variant is None or not self.storage.takes(variant, asked):
            return False
        row = variant.blob.row
        place = ChainPlace(
            link.chain_key,
            link.parent,
            link.above,
            row.start,
            link.identity,
            link.place.head if link.identity.chunk else link.chain_key.hex(),
            link.place.prefix,
            is_text=not link.identity.chunk,
        )
        host = self._nodes.claim(place, row.num_tokens)
        if host is None:
            return False
        came = partial(self._came, link, host, key)
        if not self.storage.load(variant, row.num_tokens, came, host.blob.writer(), asked):
            self._nodes.drop(host)
            self._nodes.released(host)
            return False
        return True

    def _came(self, link: _Link, host: HostNode, key: ChunkKey | None, entry: Entry | None) -> None:
        """The node's KV is in host memory, or is not to be had."""
        if not self._nodes.released(host):  # it has left meanwhile
            return
        # Of no request: the device may have it by now, and nobody knows where.
        if entry is None or (key is None and not self._is_starting):
            self._nodes.drop(host)
            return
        path = self._tree.path(key.part(0, link.stop)) if key is not None else []
        is_on_device = bool(path) and sum(node.key.num_tokens for node in path) == link.stop
        self._nodes.came(host, path[-1] if is_on_device else None)

    def _links_of(self, variant: Variant) -> Iterator[_Link]:
        """An entry of no tenant with all above it, as far as that is there."""
        place = variant.blob.row.place
        key, area, _ = place.exact.split()
        first, num_before = area[: 2 * KEY_BYTES], area[2 * KEY_BYTES :]
        chunks = place.prefix if key == first else (*place.prefix, place.chunk)
        num = int(num_before or "0", 16)
        links = self._chain(bytes.fromhex(first), place.head, chunks, (None, None), num)
        return takewhile(lambda link: link.is_empty or self._find(link) is not None, links)


def how_computed(ctx: Any) -> tuple[str, ...]:
    """What a chain's bits depend on beside model, weights, tokens. `ctx`: TreeCacheBuildContext."""
    args, device = ctx.server_args, torch.device(ctx.tp_worker.model_runner.device)
    is_cuda = device.type == "cuda"
    of_phases = args.prefill_attention_backend, args.decode_attention_backend
    return (
        torch.cuda.get_device_name(device) if is_cuda else torch.backends.cpu.get_cpu_capability(),
        f"tp{args.tp_size}",
        sglang.__version__,
        torch.__version__,
        # entries of pages begin and end with one
        *([f"page{args.page_size}"] if (args.page_size or 1) > 1 else []),
        *map(str, (args.attention_backend, *of_phases)),
    )


def create_stored_chains(
    host: HostChains, storage: Storage, ctx: Any, config: ChunkCacheConfig
) -> StoredChains:
    """Of one rank, with host memory filled. `ctx` is SGLang's TreeCacheBuildContext."""
    model = ctx.tp_worker.model_runner.model
    # else the fuser starts the storage
    weights = partial(fingerprint, model) if config.reuse == "exact" else None
    stored = StoredChains(host, storage, how=how_computed(ctx), fingerprint=weights)
    stored.load_most_used()
    return stored
