"""`pdxfer.LLM`: vLLM's offline engine with the tiered store in it. Loaded on first use; imports vllm.

    llm = pdxfer.LLM(model="...", cache={"local_cpu": True, "local_disk": "/var/cache/kv"}, max_model_len=4096)

What one call computed is loaded by the next one, also in another process and after a restart (docs/reuse.md).
"""

from os import PathLike, fspath
from typing import Any

from vllm import LLM as VllmLLM

from pdxfer.config.offline import as_tokens, transfer_config
from pdxfer.core.errors import ConfigError


class LLM(VllmLLM):
    """A `vllm.LLM` that saves and loads KV. Everything but `cache` goes to vLLM."""

    def __init__(
        self, model: str | PathLike[str], *args: Any, cache: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if not isinstance(model, str | PathLike):
            raise ConfigError(
                f"pdxfer.LLM was given a {type(model).__name__}: an engine that is already built cannot be wrapped, "
                "because vLLM fixes its connector when it starts. Write pdxfer.LLM(model=..., cache={...}) with the "
                "arguments that the engine was built with"
            )
        if kwargs.get("kv_transfer_config") is not None:
            raise ConfigError("pdxfer.LLM sets kv_transfer_config itself: put what you need into `cache`")
        kwargs["kv_transfer_config"] = transfer_config({} if cache is None else cache)
        kwargs.setdefault("worker_extension_cls", "pdxfer.connector.rpc.StoreRpc")
        super().__init__(fspath(model), *args, **kwargs)

    def lookup(self, token_ids: list[int], cache_salt: str = "") -> int:
        """How many leading chunks of this prompt the tiers hold, on every rank."""
        return int(min(self.collective_rpc("pdxfer_lookup", args=(as_tokens(token_ids), cache_salt))))

    def get(self, token_ids: list[int], start_chunk: int = 0, cache_salt: str = "") -> list[list[bytes]]:
        """The verified KV of its chunks from `start_chunk` on, up to the first that no tier has: raw bytes, layer by
        layer and block by block, a list a rank."""
        if start_chunk < 0:
            raise ConfigError(f"pdxfer.LLM.get: start_chunk is {start_chunk}: chunks are counted from 0")
        args = (as_tokens(token_ids), cache_salt, start_chunk)
        return [list(chunks) for chunks in self.collective_rpc("pdxfer_get", args=args)]
