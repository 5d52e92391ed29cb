"""Counters of the scheduler half in vLLM's forms: its log line and its Prometheus endpoint."""

from typing import Any

from pdxfer.connector.compat import KVConnectorPromMetrics, KVConnectorStats, VllmConfig

HELP = {
    "received_transfers": "Prompts whose KV was received completely",
    "received_bytes": "KV bytes received and verified",
    "received_units": "Units received and verified",
    "resumed_transfers": "Receives whose prefill failed and that another prefill engine took over",
    "failed_transfers": "Receives that failed; the missing tail was recomputed",
    "recomputed_blocks": "Blocks recomputed after failed receives",
    "fallbacks": "Prompts computed here although a prefill was paired",
    "sent_transfers": "Prompts whose KV was sent completely",
    "unsent_transfers": "Prompts whose KV was not (completely) sent",
    "spilled_prompts": "Prompts whose grant did not come and whose KV went to the store instead",
    "loaded_requests": "Prompts of which the store filled blocks",
    "loaded_chunks": "Chunks loaded from the store and verified",
    "loaded_bytes": "KV bytes loaded from the store",
    "load_failures": "Loads that came up short; the rest was computed",
    "saved_chunks": "Chunks copied out for the store",
    "saved_bytes": "KV bytes copied out for the store",
    "dropped_saves": "Chunks that were not saved: too much was waiting",
    "stored_values": "Values that tiers took; a chunk that is kept in two tiers counts twice",
    "corrupt_chunks": "Stored values that were damaged or foreign, and were removed",
}


class PdxferStats(KVConnectorStats):
    """Plain sums; `data` maps a name of HELP to its increase since the last report."""

    data: dict[str, float]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class PdxferPromMetrics(KVConnectorPromMetrics):
    """`vllm:pdxfer_*_total` counters, one a name of HELP and engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, text in HELP.items():
            counter = self._counter_cls(name=f"vllm:pdxfer_{name}", documentation=text, labelnames=labelnames)
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
