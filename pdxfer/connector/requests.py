"""What we read from vLLM's requests and scheduler output: our parameters, what cannot be moved, progress."""

import logging
import os
import secrets
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pdxfer.connector.compat import Request, SchedulerOutput
from pdxfer.connector.identity import digest_adapter, digest_prompt, snapshot
from pdxfer.wire.messages import Leg, Role

log = logging.getLogger(__name__)

DEFAULT_DEADLINE_S = 60.0
MAX_CONTEXT_CHARS = 64
MAX_TENANT_CHARS = 128
"""What the proxy's configuration allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferParams:
    """Our part of kv_transfer_params, as the proxy set it."""

    transfer_id: str
    leg: Leg
    deadline_s: float
    traceparent: str = ""


def transfer_params(request: Request, role: Role) -> TransferParams | None:
    """None for requests without a (well-formed) transfer: only the router mints ids, nothing depends on their form."""
    params = request.kv_transfer_params
    ours: Any = params.get("pdxfer") if isinstance(params, dict) else None
    if not isinstance(ours, dict) or not isinstance(ours.get("transfer_id"), str) or len(ours["transfer_id"]) > 128:
        return None
    leg = ours.get("leg", role)
    deadline = ours.get("deadline_s", DEFAULT_DEADLINE_S)
    if leg not in ("prefill", "decode") or not isinstance(deadline, int | float) or not 0 < deadline < 1e6:
        return None
    context = ours.get("traceparent")
    return TransferParams(
        transfer_id=ours["transfer_id"],
        leg=leg,
        deadline_s=float(deadline),
        traceparent=context if isinstance(context, str) and len(context) <= MAX_CONTEXT_CHARS else "",
    )


def tenant_of(request: Request) -> str:
    """Whose KV this is, as the proxy (or who reaches the engine without one) says; empty: nobody's in particular."""
    params = request.kv_transfer_params
    ours: Any = params.get("pdxfer") if isinstance(params, dict) else None
    tenant = ours.get("tenant") if isinstance(ours, dict) else None
    return tenant if isinstance(tenant, str) and len(tenant) <= MAX_TENANT_CHARS else ""


def unsupported(request: Request) -> str:
    """Why this request's KV cannot be moved; empty if it can."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "prompts given as embeddings are computed by decode"
    if request.skip_reading_prefix_cache:
        return "prompt_logprobs need the whole prompt computed by decode"
    return ""


def unsupported_by_store(request: Request) -> str:
    """Why this request's KV has no chunk keys; empty if it has."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "the prompt is given as embeddings"
    if request.resumable:
        return "its prompt changes while it runs (streamed input)"
    return ""


def prompt_digest(request: Request) -> bytes:
    """Identity of a prompt: token ids, LoRA, salt, multimodal contents."""
    extra = [f"salt={request.cache_salt or ''}"]
    if request.lora_request is not None:
        lora = request.lora_request
        extra.append(f"lora={lora.lora_name}:{adapter_digest(lora.lora_path)}")
    extra.extend(f"mm={f.identifier}@{f.mm_position.offset}+{f.mm_position.length}" for f in request.mm_features or ())
    return digest_prompt(request.prompt_token_ids or [], extra)


def adapter_digest(path: str) -> str:
    """Digest of a LoRA adapter, found as vLLM finds it (below ~, in Hugging Face's cache); its path where it is not on
    this host. Cached by the files' identity. One that cannot be read is like no other: its KV is neither moved nor
    found again."""
    directory = Path(os.path.expanduser(path))
    if not directory.is_dir():
        directory = snapshot(path)
    if not directory.is_dir():
        return path
    try:
        return _files_digest(str(directory), _identities(directory)) or path
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        log.warning("LoRA adapter %s cannot be read, so its KV is not shared: %s", path, error)
        return f"{path} {secrets.token_hex(16)}"


def _identities(directory: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Of its files; a link that leads nowhere has none."""
    files = [(path, path.stat()) for path in sorted(directory.iterdir()) if path.exists()]
    return tuple((str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in files)


@lru_cache(maxsize=256)
def _files_digest(directory: str, files: tuple[tuple[str, int, int, int], ...]) -> str:
    return digest_adapter(Path(directory))


def computed_before(output: SchedulerOutput) -> dict[str, int]:
    """Request id → tokens computed before this step, for every scheduled request."""
    cached = output.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed.update((r.req_id, r.num_computed_tokens) for r in output.scheduled_new_reqs)
    return computed


def written_blocks(output: SchedulerOutput, block_size: int) -> set[int]:
    """Blocks that this step writes, over all requests."""
    state = output.kv_connector_block_state
    assert state is not None
    written: set[int] = set()
    for request_id, begin in computed_before(output).items():
        table = state.get_block_ids(request_id)
        if table is not None:
            end = begin + output.num_scheduled_tokens.get(request_id, 0)
            written.update(table[0][begin // block_size : -(-end // block_size)])
    return written
