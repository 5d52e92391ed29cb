"""The half in a worker process: hands final layers and chunks to the node, gives the scheduler half its say in a step.

Hooks run on the compute thread. They only put events into the node's queues; sending, receiving and digesting happen
on the node's own threads.
"""

import logging
from collections.abc import Mapping

import torch

from pdxfer.connector.compat import KVCacheConfig, VllmConfig
from pdxfer.connector.fingerprint import fingerprint, store_identity
from pdxfer.connector.requests import adapter_digest
from pdxfer.connector.scheduler_half import StepMeta
from pdxfer.connector.settings import ConnectorSettings
from pdxfer.connector.values import chunk_form, codecs_of, dtype_of, wire_forms
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.errors import ConfigError
from pdxfer.kv.layout import KvLayout
from pdxfer.memory.device import DeviceBlocks
from pdxfer.memory.region import Region
from pdxfer.node.node import Node
from pdxfer.node.outgoing import Ready
from pdxfer.node.settings import NodeSettings
from pdxfer.node.store_side import StoreSettings
from pdxfer.node.wire_settings import WireSettings, wire_settings
from pdxfer.transport.device import rdma_devices
from pdxfer.transport.kinds import endpoint_factories, preferred

log = logging.getLogger(__name__)

DIGEST_EVERY = {"off": 0, "sample": 16, "full": 1}
"""transport.integrity → units per digest."""


class WorkerHalf:
    """One rank's connection between vLLM's model runner and the node."""

    def __init__(self, settings: ConnectorSettings, config: VllmConfig, kv_config: KVCacheConfig, rank: int) -> None:
        self._settings, self._config, self._kv_config, self._rank = settings, config, kv_config, rank
        self._node: Node | None = None
        self._layers: dict[str, int] = {}
        self._meta, self._bound_at = StepMeta(), 0.0
        self._next_layer = 0

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """vLLM's KV tensors exist: describe them and start the node."""
        names = [n for n in self._kv_config.kv_cache_groups[0].layer_names if n in caches]
        self._layers = {name: index for index, name in enumerate(names)}
        block_size = self._kv_config.kv_cache_groups[0].kv_cache_spec.block_size
        layout = layout_of([caches[name] for name in names], self._kv_config.num_blocks, block_size)
        settings = self._settings
        marks = fingerprint(self._config, layout, len(names))
        wire = self._wire_settings(marks, caches[names[0]], layout)
        self._node = Node(
            NodeSettings(
                engine_id=settings.engine_id,
                rank=self._rank,
                halves_path=settings.halves_path,
                router=settings.router,
                security=settings.security,
                allow_insecure=settings.allow_insecure,
                options=settings.options,
                chunk_blocks=max(1, settings.chunk_tokens // block_size),
                digest_every=DIGEST_EVERY[settings.integrity],
                drain_s=settings.drain_s,
                store=self._store_settings(marks, caches[names[0]], layout) if settings.store.enabled else None,
                wire=wire,
            ),
            Region(layout),
            marks,
            endpoint_factories(self._channels(wire is not None)),
        )

    def _channels(self, has_wire: bool) -> tuple[str, ...]:
        """Kinds of channel in the order in which they are tried."""
        kinds = preferred(self._settings.channels, has_wire, bool(rdma_devices()))
        if kinds != self._settings.channels:
            log.info(
                "codec.wire is %s and there is no RDMA device: channels are tried in the order %s: codecs need tcp",
                self._settings.codec.wire,
                ", ".join(kinds),
            )
        return kinds

    def _store_settings(self, marks: dict[str, str], cache: torch.Tensor, layout: KvLayout) -> StoreSettings:
        settings, parallel = self._settings, self._config.parallel_config
        world_size = parallel.world_size
        parts = [settings.engine_id] if settings.role != "both" else []
        parts += [f"dp{parallel.data_parallel_index}"] if parallel.data_parallel_index else []
        parts += [f"rank{self._rank}"] if world_size > 1 else []
        return StoreSettings(
            config=settings.store,
            identity=store_identity(marks, self._rank, world_size),
            blocks=DeviceBlocks(_bytes_of(cache), layout) if cache.is_cuda else None,
            codecs=codecs_of(marks["weights"], settings.tables_dir, self._rank, world_size),
            form=chunk_form(cache, marks["packing"], layout.block_size, layout.num_layers, settings.store),
            dtype=dtype_of(cache),
            subdirectory="-".join(parts),
            shares=world_size,
            adapter=adapter_digest,
        )

    def _wire_settings(self, marks: dict[str, str], cache: torch.Tensor, layout: KvLayout) -> WireSettings | None:
        config = self._settings.codec
        if config.wire == "off" or not self._settings.router:
            return None
        if layout.memory != "DRAM":
            log.warning("codec.wire is %s, but KV is in device memory: everything is sent raw", config.wire)
            return None
        served = self._config.model_config.served_model_name
        model = served if isinstance(served, str) else served[0]
        forms = wire_forms(cache, marks["packing"], layout.block_size)
        world_size = self._config.parallel_config.world_size
        codecs = codecs_of(marks["weights"], self._settings.tables_dir, self._rank, world_size)
        return wire_settings(config, model, codecs, forms, dtype_of(cache))

    def bind(self, meta: StepMeta) -> None:
        """A step begins."""
        self._meta, self._next_layer, self._bound_at = meta, 0, SYSTEM_CLOCK.now()
        if meta.plans and self._node is not None:
            self._node.begin_step(meta.plans)

    def layer_done(self, name: str) -> None:
        """The attention of this layer ran: its new KV is final (on CUDA: once the stream gets here)."""
        if not self._meta.plans or not self._settings.layerwise or self._node is None:
            return
        index = self._layers.get(name)
        if index is not None and index >= self._next_layer:
            self._node.layers_done(self._next_layer, index + 1 - self._next_layer, self._event())
            self._next_layer = index + 1

    def step_done(self) -> None:
        """The forward ran: whatever layers were not handed over yet are final."""
        remaining = len(self._layers) - self._next_layer
        if self._meta.plans and remaining > 0 and self._node is not None:
            self._node.layers_done(self._next_layer, remaining, self._event())
            self._next_layer = len(self._layers)
        if self._node is not None and not torch.cuda.is_available():
            self._node.stepped(self._meta.num_tokens, SYSTEM_CLOCK.now() - self._bound_at)
            self._node.computed(self._meta.plans)
        if self._meta.saves and self._node is not None:
            self._node.save(self._meta.saves, self._event())

    def load_errors(self) -> set[int]:
        """Verdicts of the scheduler half, given back to vLLM in the step that carries them."""
        return set(self._meta.invalid_blocks)

    @property
    def node(self) -> Node | None:
        """Once the KV cache is there."""
        return self._node

    @property
    def unsettled(self) -> bool:
        """The scheduler half wants update_connector_output to run after this step."""
        return self._meta.unsettled

    def close(self) -> None:
        """Stop the node."""
        if self._node is not None:
            self._node.close()

    def _event(self) -> Ready:
        """On CUDA: a wait for what the compute stream has been given so far; None on CPU."""
        if not torch.cuda.is_available():
            return None
        event = torch.cuda.Event()
        event.record()
        return event.synchronize  # type: ignore[no-any-return]


def _bytes_of(cache: torch.Tensor) -> torch.Tensor:
    """The storage that all layers are views of, as uint8 [num_bytes]."""
    storage = cache.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(storage)


def layout_of(tensors: list[torch.Tensor], num_blocks: int, block_size: int) -> KvLayout:
    """Geometry of vLLM's KV tensors, shape [B, H, N, C] each, all views of one storage.

    A manager block may be several kernel blocks (B = num_blocks × ratio); they are adjacent and count as one.
    Raises ConfigError for layouts whose blocks are not dense.
    """
    storages = {t.untyped_storage().data_ptr() for t in tensors}
    if len(storages) != 1:
        raise ConfigError(f"KV cache lies in {len(storages)} storages; one is supported. Do not set hybrid KV options")
    base = storages.pop()
    first = tensors[0]
    kinds = {(tuple(t.shape), t.stride(), t.dtype) for t in tensors}
    if len(kinds) != 1:
        raise ConfigError(f"the layers' KV tensors are of {len(kinds)} kinds: mixed caches are not moved yet")
    ratio, rest = divmod(first.shape[0], num_blocks)
    if rest or ratio < 1:
        raise ConfigError(f"KV tensor has {first.shape[0]} blocks for a pool of {num_blocks}: unknown layout")
    inner = first[0].numel() * first.element_size()
    stride = first.stride(0) * first.element_size()
    if not _is_dense(first[0]) or (ratio > 1 and stride != inner):
        raise ConfigError(
            f"KV blocks are not contiguous (shape {tuple(first.shape)}, strides {first.stride()}): "
            "start vLLM without VLLM_KV_CACHE_LAYOUT, or with LBHNC or BLHNC"
        )
    return KvLayout(
        base=base,
        num_bytes=first.untyped_storage().nbytes(),
        num_blocks=num_blocks,
        block_bytes=inner * ratio,
        block_stride=stride * ratio,
        layer_offsets=tuple(t.data_ptr() - base for t in tensors),
        block_size=block_size,
        memory="VRAM" if first.is_cuda else "DRAM",
        device=first.get_device() if first.is_cuda else 0,
    )


def _is_dense(block: torch.Tensor) -> bool:
    """Whether one block's elements fill a contiguous range, in whatever dimension order."""
    expected = 1
    for size, stride in sorted(zip(block.shape, block.stride(), strict=True), key=lambda item: item[1]):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
