"""Entry point `vllm.general_plugins`: registers the connector so that it can be named without a module path."""


def register() -> None:
    """Idempotent; runs in the API server, EngineCore and every worker. Imports nothing heavy."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "PdxferConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("PdxferConnector", "pdxfer.connector.vllm", "PdxferConnector")
