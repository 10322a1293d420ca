"""A tree's nodes, by path and by chain id. It knows no rank and no order of use."""

from collections.abc import Sequence

from radix_ext.chain_node import ChainNode
from radix_ext.chunk import ChainId, Chunk, ChunkId, extend_chain, root_chain


class ChunkTrie:
    """Held and planned nodes. Roots are not counted, and go with their last child."""

    def __init__(self) -> None:
        self._roots: dict[str, ChainNode] = {}
        self.by_chain: dict[ChainId, ChainNode] = {}  # only the trie changes it

    def __len__(self) -> int:
        return len(self.by_chain)

    def root(self, namespace: str) -> ChainNode | None:
        """Where the chains of a namespace begin, None if there are none."""
        return self._roots.get(namespace)

    @property
    def roots(self) -> tuple[ChainNode, ...]:
        """Where chains begin, one for each namespace that has some. O(namespaces)."""
        return tuple(self._roots.values())

    def find(self, chain: ChainId) -> ChainNode | None:
        return self.by_chain.get(chain)

    def reach(self, namespace: str, chunks: Sequence[Chunk]) -> list[ChainNode]:
        """`descend` from the root of the namespace."""
        root = self._roots.get(namespace)
        if root is None:
            root = ChainNode(root_chain(namespace), ChunkId(namespace), 0, None)
        path = self.descend(root, chunks)
        # A root goes with its last child, so one without any would stay for ever.
        if path:
            self._roots[namespace] = root
        return path

    def descend(self, node: ChainNode, chunks: Sequence[Chunk]) -> list[ChainNode]:
        """These chunks' nodes below `node`, made where missing, until a chain id collides."""
        path = []
        for chunk in chunks:
            child = node.child(chunk.id) or self._create(node, chunk)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def remove(self, node: ChainNode) -> None:
        assert node.children is None
        assert node.parent is not None
        del self.by_chain[node.chain]
        parent = node.parent
        siblings = parent.children
        if isinstance(siblings, dict):
            del siblings[node.chunk_id]
            # Back to the short form: else each node that ever had two children would keep a dict.
            if len(siblings) == 1:
                parent.children = next(iter(siblings.values()))
        else:
            parent.children = None
            if parent.parent is None:
                del self._roots[parent.chunk_id]

    def _create(self, parent: ChainNode, chunk: Chunk) -> ChainNode | None:
        chain = extend_chain(parent.chain, chunk.id)
        # Another path's node has the id: without its entry it could be neither found nor trimmed.
        if chain in self.by_chain:
            return None
        node = self.by_chain[chain] = ChainNode(chain, chunk.id, chunk.num_tokens, parent)
        node.newer = node.older = node  # so that `LruList` unlinks a new node like any other
        siblings = parent.children
        if siblings is None:
            parent.children = node
        elif isinstance(siblings, dict):
            siblings[node.chunk_id] = node
        else:
            parent.children = {siblings.chunk_id: siblings, node.chunk_id: node}
        return node
