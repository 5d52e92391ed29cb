"""What `pdxfer.LLM` asks its workers about the store, as vLLM's worker extension: vLLM adds these methods to a worker.

Runs on the worker's thread between steps; waits for the store's thread within a deadline.
"""

from pdxfer.core.errors import ConfigError
from pdxfer.node.node import Node
from pdxfer.store.runtime import StoreThread
from pdxfer.store.tiered import TieredStore
from pdxfer.wire.manage import StoreArgs

TIMEOUT_S = 30.0


class StoreRpc:
    """Mixed into vLLM's worker; all state is the connector's."""

    def pdxfer_lookup(self, token_ids: list[int], cache_salt: str) -> int:
        """How many leading chunks this rank's tiers hold."""
        node = _node()
        keys = node.chunk_keys(StoreArgs(tokens=token_ids, salt=cache_salt))

        async def look(store: TieredStore) -> int:
            return (await store.lookup(keys, store.clock.now() + TIMEOUT_S)).num_chunks

        return _store(node).submit(look).result(TIMEOUT_S + 1)

    def pdxfer_get(self, token_ids: list[int], cache_salt: str, start_chunk: int) -> list[bytes]:
        """The verified raw bytes of the chunks from `start_chunk` on, up to the first that no tier has."""
        node = _node()
        keys = node.chunk_keys(StoreArgs(tokens=token_ids, salt=cache_salt))

        async def read(store: TieredStore) -> list[bytes]:
            """One by one: a tier's buffers are few, and a long prompt has more chunks than they hold."""
            values: list[bytes] = []
            deadline = store.clock.now() + TIMEOUT_S
            for key in keys[start_chunk:]:
                chunk = await store.get_chunk(key, deadline)
                if chunk is None:
                    break
                async with chunk:
                    values.append(bytes(chunk.raw))
            return values

        return _store(node).submit(read).result(TIMEOUT_S + 1)


def _store(node: Node) -> StoreThread:
    if node.store is None:
        raise ConfigError("this engine has no store: set store.enabled")
    return node.store.thread


def _node() -> Node:
    """This process's."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    node: Node | None = get_kv_transfer_group().node
    assert node is not None, "asked before the KV cache was there"
    return node
