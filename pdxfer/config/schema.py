"""Every setting there is: one struct a section, with default, range and meaning.

Read by config/load.py; the texts under the fields are also what `pdxfer config schema` and `config show --help` print.
A renamed key gets no alias: the changelog tells. Cross-field rules raise ValueError in __post_init__.
"""

from typing import Annotated, Literal

from msgspec import Meta, field

from pdxfer.config.section import Count, CountOrAuto, Port, Seconds, Secrets, Section
from pdxfer.config.store import CodecConfig, StoreConfig, TierConfig


class ModelConfig(Section, frozen=True):
    """Which model the engines serve."""

    path: Annotated[str, Meta(min_length=1)] = "demo"
    """Directory of the model, a Hugging Face name, or `demo`: the small model that `pdxfer model demo` prepares."""
    served_name: str = ""
    """Name clients ask for; empty: the last part of the path."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and KV."""


class EngineConfig(Section, frozen=True):
    """How each vLLM engine is started. 0 leaves a number to vLLM."""

    kind: Literal["vllm", "fake"] = "vllm"
    """`fake` computes nothing: it shows router, proxy and streaming on any machine."""
    max_model_len: CountOrAuto = 0
    """Longest prompt + output, in tokens; 0: the model's own."""
    max_num_seqs: CountOrAuto = 0
    """Requests that run at once in one engine."""
    max_num_batched_tokens: CountOrAuto = 0
    """Tokens of one step. Smaller steps overlap more of a long prompt's transfer where `transport.layerwise` is off."""
    block_size: CountOrAuto = 0
    """Tokens of one KV block."""
    kv_cache_gib: Annotated[float, Meta(ge=0)] = 0.0
    """GiB of KV blocks in each engine."""
    gpu_memory_fraction: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Part of a GPU's memory one engine may take; needed below 0.5 where two share a GPU."""
    enforce_eager: bool = False
    """No compilation and no CUDA graphs: starts faster, runs slower on GPUs."""
    prefix_caching: bool = True
    """Keep KV of finished requests in the engine for prompts with the same beginning."""
    extra_args: list[str] = field(default_factory=list)
    """Further flags of vLLM's API server, as they are."""
    env: dict[str, str] = field(default_factory=dict)
    """Further environment variables of the engines."""
    startup_timeout_s: Seconds = 600.0
    """An engine that is not ready after this ends the launch; after a restart it is reported and waited for."""
    stop_timeout_s: Seconds = 20.0
    """After SIGTERM an engine has this long to finish what runs (all but 5 s of it) and to leave; then it is killed."""
    max_restarts: Annotated[int, Meta(ge=0)] = 3
    """How often a process that died is started again before the launch gives up; five quiet minutes reset the count."""


class EnginePlace(Section, frozen=True):
    """One engine of the topology."""

    id: str = ""
    """Stable name; empty: p0, p1 ... and d0, d1 ..."""
    port: Port = 0
    """Of its HTTP API; 0: the next one from `prefill_port` or `decode_port`."""
    cpus: int | str = ""
    """Cores it computes on, as vLLM writes them: `0`, `0-7`, one group a rank `0-7|8-15`; empty: an equal share."""
    gpus: list[int] = field(default_factory=list)
    """GPU numbers it may see; empty: the next free one, or none on a machine without."""


class TopologyConfig(Section, frozen=True):
    """Which engines `pdxfer launch --role all` starts on this host: a number, or a list with their places."""

    prefill: Annotated[int, Meta(ge=0, le=64)] | Annotated[list[EnginePlace], Meta(max_length=64)] = 1
    """Engines that read prompts."""
    decode: Annotated[int, Meta(ge=0, le=64)] | Annotated[list[EnginePlace], Meta(max_length=64)] = 1
    """Engines that write answers."""
    prefill_port: Port = 8100
    """HTTP port of the first prefill engine; the next ones count up."""
    decode_port: Port = 8200
    """HTTP port of the first decode engine; the next ones count up."""


class NetworkConfig(Section, frozen=True):
    """Where this host listens and how others reach it."""

    bind: str = ""
    """Address that router, engines and data channels listen on; empty: loopback, or towards a router elsewhere.
    Beyond loopback `security` must be set."""
    advertise: str = ""
    """Address others connect to; empty: of `interface`, else `bind` if it is one, else towards the router."""
    interface: str = ""
    """Network interface whose address is advertised."""
    ports: tuple[Port, Port] = (5600, 5699)
    """First and last port of data channels; [0, 0] lets the OS choose."""

    def __post_init__(self) -> None:
        first, last = self.ports
        if first > last or (first == 0) != (last == 0):
            raise ValueError(f"ports is [{first}, {last}]: write [first, last], or [0, 0] for any free port")


class RouterConfig(Section, frozen=True):
    """The router: membership, pairing and flow control."""

    endpoint: str = ""
    """Where members find the router, tcp://HOST:PORT; empty: this host at `port`."""
    port: Port = 5570
    """ZMQ port the router listens on."""
    min_remote_tokens: Annotated[int, Meta(ge=0)] = 256
    """Shorter prompts go to a decode engine alone. Text is counted as one token for four bytes."""
    max_queue: Count = 1024
    """Requests that may wait for capacity; more are answered 503 with Retry-After."""
    max_wait_s: Seconds = 120.0
    """Longest wait for capacity; then 503 with Retry-After."""
    lease_s: Seconds = 120.0
    """Life of a pairing that makes no progress."""
    heartbeat_s: Seconds = 0.5
    """Interval at which members report."""
    missed_heartbeats: Annotated[int, Meta(ge=2)] = 3
    """A member that missed this many gets no new work."""
    forget_s: Seconds = 60.0
    """A silent member is forgotten after this."""
    message_rate: Count = 20000
    """Messages per second and connection; each 4 KiB of a message count as one more. What is beyond is dropped."""


class ControllerConfig(Section, frozen=True):
    """The management API, in the router's process."""

    port: Port = 5580
    """HTTP port; `pdxfer status` and its siblings ask here."""


class ProxyConfig(Section, frozen=True):
    """The OpenAI API in front of the pair."""

    bind: str = ""
    """Address to listen on; empty: `network.bind`, or loopback. Beyond loopback `api_keys` must be set."""
    port: Port = 8000
    """HTTP port."""
    api_keys: Secrets = field(default_factory=dict)
    """Bearer token → tenant. Empty: no authentication."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Model name clients may use → name the engines serve."""
    passthrough: list[str] = field(default_factory=list)
    """Further paths that go to a decode engine as they are, except that JSON loses kv_transfer_params and gets its
    tenant's cache_salt; a trailing * matches any rest."""
    max_in_flight: Count = 1024
    """Admitted requests; more are answered 429."""
    max_body_mib: Annotated[float, Meta(gt=0)] = 32.0
    """Larger requests are answered 413."""
    request_timeout_s: Seconds = 600.0
    """From arrival to last byte."""
    pair_timeout_s: Seconds = 150.0
    """Longest wait for the router's answer, the wait for capacity included (`router.max_wait_s`)."""
    client_stall_s: Seconds = 60.0
    """A client that takes no more of its answer, or has not sent its whole request, for this long is cut off.
    The controller cuts off the latter too."""
    drain_timeout_s: Seconds = 30.0
    """After SIGTERM running requests may finish for this long."""


class TransportConfig(Section, frozen=True):
    """How KV moves from prefill to decode."""

    channels: Annotated[list[str], Meta(min_length=1)] = field(default_factory=lambda: ["local", "nixl", "tcp"])
    """Kinds of channel in order of preference; the first that works between two engines is taken. With `codec.wire` on
    and no RDMA device the default order is [local, tcp, nixl]: codecs travel over `tcp` only."""
    integrity: Literal["off", "sample", "full"] = "full"
    """Which units carry a digest that decode verifies before it uses them."""
    layerwise: bool = True
    """Send each layer when it is computed, not each step: hides the transfer behind a long prompt's prefill."""
    chunk_tokens: Annotated[int, Meta(ge=16, le=8192, multiple_of=16)] = 256
    """Tokens of one chunk; a multiple of the engines' block size."""
    deadline_s: Seconds = 120.0
    """KV that has not arrived after this is recomputed by decode."""
    spill_after_ms: Annotated[float, Meta(ge=0)] = 2000.0
    """A computed prompt whose grant has not come after this goes to the store, where decode's engine reaches it too,
    and its blocks back to prefill."""
    max_resumes: Annotated[int, Meta(ge=0, le=8)] = 1
    """How often a transfer whose prefill engine fails goes on with another one; then decode computes the rest."""
    connect_timeout_s: Seconds = 5.0
    """To open a channel and probe it."""
    write_timeout_s: Seconds = 10.0
    """A peer that takes no byte for this long is lost."""
    drain_s: Seconds = 0.2
    """How long an aborted transfer may end by itself before its peer is cut off."""
    max_fence_groups: Annotated[int, Meta(ge=1, le=64)] = 8
    """NIXL agents of one engine; a fence destroys one, and the transfers on it with it."""


class MetricsConfig(Section, frozen=True):
    """What is observed beyond the built-in counters."""

    otlp_endpoint: str = ""
    """http://HOST:PORT of an OpenTelemetry collector; empty: no traces. Needs pip install pdxfer[otel]."""
    trace_sample: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Part of the requests that are traced, unless the client's traceparent decides."""
    timelines: Count = 2048
    """Requests whose timeline is kept for GET /v1/pdxfer/timeline."""


class SecurityConfig(Section, frozen=True):
    """Who may join and who may ask. Nothing is needed on loopback."""

    keys_dir: str = ""
    """Directory made by `pdxfer keys new`: encrypts and authenticates the control plane (not KV, not HTTP)."""
    token_file: str = ""
    """File with the cluster's bearer token: required by the management API and the engines, sent by proxy and CLI."""
    allow_insecure: bool = False
    """Listen beyond loopback without keys and token. Anyone who reaches the host can then read and corrupt KV."""


class LogConfig(Section, frozen=True):
    """What our processes log, on stderr."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe level shown."""
    style: Literal["auto", "text", "json"] = "auto"
    """`auto` is text on a terminal and JSON lines elsewhere."""


class Config(Section, frozen=True):
    """The whole configuration."""

    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    controller: ControllerConfig = field(default_factory=ControllerConfig)
    proxy: ProxyConfig = field(default_factory=ProxyConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    codec: CodecConfig = field(default_factory=CodecConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    log: LogConfig = field(default_factory=LogConfig)


__all__ = ["CodecConfig", "Config", "Section", "StoreConfig", "TierConfig"]
