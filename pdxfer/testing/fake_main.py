"""`python -m pdxfer.testing.fake_engine`: one fake engine as a process of its own, a member of a cluster."""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from pdxfer.codec.form import PackedForm
from pdxfer.codec.registry import Codecs
from pdxfer.config.store import CodecConfig, StoreConfig
from pdxfer.core.errors import ConfigError, ListenError
from pdxfer.core.ids import is_engine_id
from pdxfer.core.logs import setup_logging
from pdxfer.kv.pack import Packing
from pdxfer.metrics.spans import Spans
from pdxfer.node.node import Node
from pdxfer.node.settings import NodeSettings
from pdxfer.node.store_side import StoreSettings
from pdxfer.node.wire_settings import WireSettings, split, wire_settings
from pdxfer.testing.fake_engine import FakeEngine, FakeEngineSettings
from pdxfer.testing.fake_kv import FakeCache
from pdxfer.testing.fake_link import MemberSettings
from pdxfer.testing.fake_member import FakeMember
from pdxfer.transport.base import EndpointOptions
from pdxfer.transport.kinds import endpoint_factories
from pdxfer.wire.keys import load_client_security
from pdxfer.wire.run_sockets import socket_path

log = logging.getLogger(__name__)

CHUNK_TOKENS = 256


def main(argv: Sequence[str] | None = None) -> None:
    """Run until SIGTERM. Exit code 2 for settings that cannot work, 1 for a port that is taken."""
    options = _parser().parse_args(argv)
    setup_logging(options.log_level)
    try:
        asyncio.run(serve(options))
    except (ConfigError, ListenError) as error:
        print(f"fake engine {options.engine_id}: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from error


async def serve(options: argparse.Namespace) -> None:
    """One engine from join to leave."""
    if not is_engine_id(options.engine_id):
        raise ConfigError(f"--engine-id {options.engine_id!r}: use letters, digits, '.', '_' and '-', at most 64")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    options.max_model_len = min(options.max_model_len, (options.num_blocks - 1) * options.block_size)
    url = options.url or f"http://{options.host}:{options.port}"
    member = join(options, url)
    engine = FakeEngine(
        FakeEngineSettings(
            engine_id=options.engine_id,
            host=options.host,
            port=options.port,
            served_names=(options.model,),
            adapters={name: f"/adapters/{name}" for name in options.lora},
            api_key=os.environ.get("VLLM_API_KEY", ""),
            max_model_len=options.max_model_len,
            inter_token_s=options.inter_token_ms / 1000,
        ),
        member,
        keep_requests=False,
    )
    try:
        async with engine:
            log.info("fake %s engine %s on %s, router %s", options.role, options.engine_id, url, options.router)
            await stop.wait()
    except OSError as error:
        raise ListenError(f"cannot listen on {options.host}:{options.port}: {error.strerror or error}") from error
    finally:
        await member.close()


def join(options: argparse.Namespace, url: str) -> FakeMember:
    """The engine's membership, with a node of its own."""
    security = load_client_security(Path(options.keys)) if options.keys else None
    wire = _wire(options)
    packing = _packing(options)
    cache = FakeCache(
        num_blocks=options.num_blocks,
        block_size=options.block_size,
        num_layers=options.num_layers,
        block_bytes=packing.block_bytes,
        is_exact=not options.near
        and (wire is None or all(wire.codecs.get(*split(entry)).lossless for entry in wire.entries)),
    )
    fingerprint = {"model": options.model, "layout": f"fake {options.num_layers}x{cache.layout.block_bytes}"}
    halves_path = socket_path(f"fake-{options.engine_id}-{os.getpid()}")

    def make_node() -> Node:
        settings = NodeSettings(
            engine_id=options.engine_id,
            rank=0,
            halves_path=halves_path,
            router=options.router,
            security=security,
            options=EndpointOptions(bind=options.host, advertise=urlsplit(url).hostname or options.host),
            chunk_blocks=max(1, CHUNK_TOKENS // options.block_size),
            store=_store(options, fingerprint),
            wire=wire,
        )
        return Node(settings, cache.region, fingerprint, endpoint_factories(options.channels.split(",")))

    settings = MemberSettings(
        engine_id=options.engine_id,
        role=options.role,
        url=url,
        served_names=(options.model,),
        max_model_len=options.max_model_len,
        router=options.router,
        security=security,
        halves_path=halves_path,
        prefill_tokens_per_s=options.prefill_tokens_per_s,
        heartbeat_s=options.heartbeat_s,
        spans=Spans(options.engine_id, options.otlp_endpoint) if options.otlp_endpoint else None,
        chunk_tokens=CHUNK_TOKENS,
    )
    return FakeMember(settings, cache, make_node)


def _store(options: argparse.Namespace, identity: dict[str, str]) -> StoreSettings | None:
    """The node's store, in directories of this engine's own."""
    if not options.store:
        return None
    try:
        config = msgspec.json.decode(options.store, type=StoreConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--store: {error}") from error
    return StoreSettings(config=config, identity=identity, subdirectory=options.engine_id)


def _packing(options: argparse.Namespace) -> Packing:
    return Packing(
        kind="plain", heads=options.kv_heads, block_size=options.block_size, head_dim=options.head_dim, item_bytes=2
    )


def _wire(options: argparse.Namespace) -> WireSettings | None:
    packing = _packing(options)
    try:
        config = msgspec.json.decode(options.codec or "{}", type=CodecConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--codec: {error}") from error
    return wire_settings(config, options.model, Codecs(), lambda n: PackedForm(packing, "bfloat16", n), "bfloat16")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pdxfer.testing.fake_engine", description=__doc__)
    parser.add_argument("--role", choices=("prefill", "decode", "both"), required=True)
    parser.add_argument("--engine-id", required=True)
    parser.add_argument("--model", default="fake", help="name clients ask for")
    parser.add_argument("--lora", action="append", default=[], help="name of an adapter; may be repeated")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--url", default="", help="HTTP base as the proxy reaches it; default from host and port")
    parser.add_argument("--router", required=True, help="tcp://HOST:PORT")
    parser.add_argument("--keys", default="", help="directory made by `pdxfer keys new`")
    parser.add_argument("--channels", default="tcp", help="kinds of channel, in order, by commas")
    parser.add_argument("--store", default="", help="section `store` of the configuration as JSON; default none")
    parser.add_argument("--codec", default="", help="section `codec` of the configuration as JSON; default no codecs")
    parser.add_argument("--prefill-tokens-per-s", type=float, default=5000.0)
    parser.add_argument("--inter-token-ms", type=float, default=20.0)
    parser.add_argument("--heartbeat-s", type=float, default=0.5)
    parser.add_argument("--num-blocks", type=int, default=2048)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--near", action="store_true", help="decode looks at a sample of the KV, and takes near values")
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=1)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--otlp-endpoint", default="", help="OpenTelemetry collector, http://HOST:PORT")
    parser.add_argument("--log-level", default="INFO")
    return parser
