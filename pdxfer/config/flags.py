"""The --kv-transfer-config that puts our connector into a vLLM server: used by the launcher, the benches and doctor.

Plain JSON; imports no vllm, so it lives where all of them may reach it.
"""

import json
from collections.abc import Mapping

CONNECTOR = "PdxferConnector"
CONNECTOR_MODULE = "pdxfer.connector.vllm"


def kv_transfer_config(
    *,
    role: str,
    engine_id: str,
    url: str = "",
    router: str = "",
    config: str = "",
    extra: Mapping[str, object] | None = None,
) -> str:
    """The flag's JSON. `kv_role` is always kv_both: a kv_producer that loads from tiers races async scheduling."""
    ours: dict[str, object] = {"role": role, "engine_id": engine_id}
    ours |= {key: value for key, value in (("config", config), ("router", router), ("url", url)) if value}
    flags = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": ours | dict(extra or {}),
    }
    return json.dumps(flags, separators=(",", ":"))
