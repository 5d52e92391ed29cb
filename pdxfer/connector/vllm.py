"""PdxferConnector: the class vLLM loads. Only forwards each hook to the scheduler half or the worker half.

The module is imported in the API server too (class methods only), so it must import without nixl and without side
effects. Traps of vLLM's interface are noted where they are dodged.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdxfer.connector.compat import (
    BlockPool,
    FullAttentionSpec,
    KVCacheBlocks,
    KVCacheConfig,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorPromMetrics,
    KVConnectorRole,
    KVConnectorStats,
    KVConnectorWorkerMetadata,
    Request,
    SchedulerOutput,
    SupportsHMA,
    VllmConfig,
)
from pdxfer.connector.member import EngineFacts
from pdxfer.connector.rest import rest_between_steps
from pdxfer.connector.scheduler_half import SchedulerHalf, StepMeta
from pdxfer.connector.settings import ConnectorSettings, settings_from
from pdxfer.connector.stats import PdxferPromMetrics, PdxferStats
from pdxfer.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from pdxfer.connector.worker_half import WorkerHalf
    from pdxfer.node.node import Node

log = logging.getLogger(__name__)


@dataclass
class PdxferMetadata(KVConnectorMetadata):
    """One step's message to the workers."""

    step: StepMeta


@dataclass
class PdxferWorkerMetadata(KVConnectorWorkerMetadata):
    """Says nothing; being there makes update_connector_output run in steps without tokens."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return self


class PdxferConnector(KVConnectorBase_V1, SupportsHMA):
    """Streams KV between a prefill and a decode engine; see docs/design.md for the request's life."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_with_vllm()
        rest_between_steps()
        settings = settings_from(vllm_config)
        _refuse_parallel(vllm_config, settings)
        _refuse_unsupported(kv_cache_config)
        self._settings = settings
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            # Read by Scheduler.__init__ after this constructor; the default "fail" would turn a lost peer into errors.
            assert vllm_config.kv_transfer_config is not None
            vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
            self._scheduler = SchedulerHalf(settings, _facts(vllm_config, kv_cache_config))
            log.info("%s engine %s, router %s", settings.role, settings.engine_id, settings.router or "none")
        else:
            from pdxfer.connector.worker_half import WorkerHalf

            rank = vllm_config.parallel_config.rank % vllm_config.parallel_config.world_size
            self._worker = WorkerHalf(settings, vllm_config, kv_cache_config, rank)

    @property
    def _s(self) -> SchedulerHalf:
        assert self._scheduler is not None, "called on the worker half"
        return self._scheduler

    @property
    def _w(self) -> WorkerHalf:
        assert self._worker is not None, "called on the scheduler half"
        return self._worker

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    # ---- class methods -----------------------------------------------------------------------------------------------

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Full CUDA graphs would skip save_kv_layer."""
        return extra_config.get("role") in ("prefill", "both") and bool(extra_config.get("layerwise", True))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return PdxferStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return PdxferPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def requires_kv_delivery(self) -> bool:
        """A prefill preempted in its last step has to run again; a decode need not."""
        return self._settings.role == "prefill"

    # ---- scheduler half ----------------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._s.bind(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        self._s.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._s.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._s.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return PdxferMetadata(self._s.build_meta(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._s.update(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._s.finished(request, block_ids)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._s.finished(request, block_ids[0] if block_ids else [])
        return False, None

    def reset_cache(self) -> bool | None:
        """vLLM was told to forget everything, say because weights changed under it: stored KV is not to be used."""
        self._s.reset()
        return True

    def has_pending_block_frees(self) -> bool:
        return self._s.references_out

    def has_pending_push_work(self) -> bool:
        return self._s.must_step

    @property
    def node(self) -> Node | None:
        """The worker half's runtime (rpc.py)."""
        return self._w.node

    # ---- worker half -------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._w.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, PdxferMetadata)
        self._w.bind(connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to start: receives begin with the Grant, loads with Load, outside steps."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: a scheduled request's KV is complete."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        self._w.layer_done(layer_name)

    def wait_for_save(self) -> None:
        self._w.step_done()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._w.load_errors()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return PdxferWorkerMetadata() if self._w.unsettled else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._scheduler is None:
            return None
        values = self._scheduler.take_counters()
        return PdxferStats(data=values) if values else None


def _log_with_vllm() -> None:
    """Our log lines go where vLLM's go, in its form and at its level."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("pdxfer")
    ours.handlers[:] = theirs.handlers
    ours.setLevel(theirs.level)
    ours.propagate = theirs.propagate


def _facts(config: VllmConfig, kv_config: KVCacheConfig) -> EngineFacts:
    model, scheduler = config.model_config, config.scheduler_config
    served = model.served_model_name
    block_size = kv_config.kv_cache_groups[0].kv_cache_spec.block_size
    return EngineFacts(
        model=str(model.model),
        served_names=[served] if isinstance(served, str) else list(served or [model.model]),
        num_blocks=kv_config.num_blocks,
        block_size=block_size,
        max_model_len=model.max_model_len,
        world_size=config.parallel_config.world_size,
        max_step_blocks=-(-scheduler.max_num_batched_tokens // block_size) + scheduler.max_num_seqs,
        plans_ready_hits=not scheduler.async_scheduling,
    )


def _refuse_parallel(config: VllmConfig, settings: ConnectorSettings) -> None:
    """Fail at start where a block is not what one rank holds of `block_size` tokens, or an engine not one member."""
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError("pipeline parallelism is not supported by pdxfer yet: use --tensor-parallel-size only")
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ConfigError(
            "context parallelism is not supported by pdxfer: it spreads a block's tokens over ranks. Leave out "
            "--decode-context-parallel-size and --prefill-context-parallel-size"
        )
    if parallel.use_ubatching and settings.layerwise and settings.role != "decode":
        raise ConfigError(
            "with --enable-dbo a layer is computed in two parts, and its KV is not whole after the first: "
            'set transport.layerwise to false, also as "layerwise" in kv_connector_extra_config'
        )
    behind_one_url = parallel.data_parallel_size > 1 or parallel.data_parallel_index > 0
    if settings.router and behind_one_url and not parallel.data_parallel_external_lb:
        raise ConfigError(
            "data parallel ranks behind one URL cannot be told apart by the router: start each as an engine of its own"
        )


def _refuse_unsupported(kv_config: KVCacheConfig) -> None:
    """Fail at start, with what to do, rather than move KV we do not understand."""
    if len(kv_config.kv_cache_groups) != 1:
        kinds = sorted({type(g.kv_cache_spec).__name__ for g in kv_config.kv_cache_groups})
        raise ConfigError(
            f"this model has {len(kv_config.kv_cache_groups)} KV cache groups ({', '.join(kinds)}); pdxfer moves "
            "models with one. Sliding-window models: add --disable-hybrid-kv-cache-manager; Mamba hybrids are refused"
        )
    spec = kv_config.kv_cache_groups[0].kv_cache_spec
    inner = getattr(spec, "kv_cache_specs", None)
    for layer in inner.values() if isinstance(inner, dict) else [spec]:
        if type(layer) is not FullAttentionSpec:
            raise ConfigError(
                f"this model's KV cache is {type(layer).__name__}; pdxfer moves plain full attention only (others drop "
                "blocks while a request runs, or are not tested). Serve it without pdxfer"
            )


__all__ = ["ConnectorSettings", "PdxferConnector"]
