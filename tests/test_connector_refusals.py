"""What vLLM can be told to do with KV that we would move wrongly: refused at the engine's start, with what to do; and
what an engine of a plain vLLM server is called."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdxfer.core.errors import ConfigError

pytestmark = pytest.mark.slow


def refuse(role: str = "prefill", router: str = "tcp://r:5570", layerwise: bool = True, **parallel: Any) -> None:
    from vllm.config import ParallelConfig

    from pdxfer.connector.settings import ConnectorSettings
    from pdxfer.connector.vllm import _refuse_parallel

    settings: Any = {"role": role, "router": router, "layerwise": layerwise, "engine_id": "e", "url": "http://e"}
    config: Any = SimpleNamespace(parallel_config=ParallelConfig())
    for name, value in parallel.items():
        assert hasattr(config.parallel_config, name)
        setattr(config.parallel_config, name, value)
    _refuse_parallel(config, ConnectorSettings(halves_path=str(Path("h")), **settings))


@pytest.mark.parametrize(
    ("parallel", "says"),
    [
        ({"pipeline_parallel_size": 2}, "--tensor-parallel-size only"),
        ({"decode_context_parallel_size": 2}, "--decode-context-parallel-size"),
        ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size"),
        ({"enable_dbo": True}, "transport.layerwise"),
        ({"ubatch_size": 2, "role": "both"}, "transport.layerwise"),
        ({"data_parallel_size": 2}, "engine of its own"),
        ({"data_parallel_index": 1}, "engine of its own"),
    ],
)
def test_kv_that_would_be_moved_wrongly_is_refused(parallel: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        refuse(**parallel)


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"tensor_parallel_size": 2},
        {"enable_dbo": True, "layerwise": False},
        {"enable_dbo": True, "role": "decode"},
        {"data_parallel_size": 2, "data_parallel_external_lb": True},
        {"data_parallel_size": 2, "router": "", "role": "both"},
    ],
)
def test_the_rest_is_not(parallel: dict[str, Any]) -> None:
    refuse(**parallel)


def settings_of(run_id: str, kv_role: Any = "kv_both", **extra: Any) -> Any:
    from vllm.config import KVTransferConfig

    from pdxfer.connector.settings import settings_from

    transfer = KVTransferConfig(
        kv_connector="PdxferConnector", engine_id=run_id, kv_role=kv_role, kv_connector_extra_config=extra
    )
    config: Any = SimpleNamespace(kv_transfer_config=transfer)
    return settings_from(config)


def test_a_producer_is_refused() -> None:
    """vLLM puts off the freeing of blocks for consumers only, and every engine of ours loads."""
    with pytest.raises(ConfigError, match='use "kv_both"'):
        settings_of("run", "kv_producer")


@pytest.mark.parametrize(
    ("url", "engine_id"),
    [
        ("http://10.0.0.2:8200", "decode-10.0.0.2-8200"),
        ("http://user:secret@b.example:8200/", "decode-b.example-8200"),
        ("http://[fe80::1]:8200", "decode-fe80-1-8200"),
    ],
)
def test_an_engine_without_a_name_keeps_its_own_over_a_restart(url: str, engine_id: str) -> None:
    """Its tiers' directories are named by it: with another name they would be empty, and the old ones stay for ever."""
    router = "tcp://127.0.0.1:5570"
    ids = {settings_of(run_id, role="decode", router=router, url=url).engine_id for run_id in ("one", "two")}
    assert ids == {engine_id}
    long = settings_of("one", role="decode", url=f"http://{'a.' * 60}b:8200").engine_id
    assert len(long) <= 64 and long.endswith("b-8200")
    assert settings_of("one", role="both").engine_id == "both-one"
