"""Runs a model over calibration text and makes its tables: what `pdxfer codec calibrate` does.

Text is cut into windows: a context, whose KV is rounded to bfloat16 as an engine keeps it, and a probe that attends to
it. One forward pass over the probe and one backward pass per sample say how much the model's output depends on each
channel of the context's KV. The last window is kept apart: on it the steps of the levels are set by measured KL.

Needs torch and transformers, imported when called. CPU, float32; memory for the weights and one window.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pdxfer.codec import planes
from pdxfer.codec.base import ChunkSpec
from pdxfer.codec.cachegen_tables import Histograms
from pdxfer.codec.calibrate import TARGET_KL, Moments, Statistics, make_klt, unturn
from pdxfer.codec.frame import FrameHeader
from pdxfer.codec.klt import KltCodec
from pdxfer.codec.tables import MemoryTables, TableFile
from pdxfer.codec.values import from_float, to_float
from pdxfer.core.errors import ConfigError
from pdxfer.core.install import pip_install

Array = npt.NDArray[Any]
Report = Callable[[str, int, int], None]
"""(what is done, steps done, steps in all)."""

TRIALS = (0.5, 1.0, 2.0)
"""Steps tried on the last window, in parts of the expected one for the default KL."""
OTHER_TEXT = 2.0
"""KL on other text by KL on the last window, which levels allow for: measured 2.1 to 2.3 on the demo model."""
CHUNK = 256
EXACT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """How the text is cut."""

    context: int = 1536
    """Tokens whose KV is learnt from."""
    probe: int = 512
    """Tokens after it, whose dependence on that KV is measured."""
    count: int = 7
    """Windows at most; one of them is for measuring."""
    samples: int = 2
    """Backward passes a window."""


class LoadedModel:
    """A causal model of transformers, with what calibration and the codec bench ask of it."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError for what is no model directory, or without torch and transformers."""
        try:
            import torch
            from transformers import AutoModelForCausalLM, AutoTokenizer
        except ImportError as error:
            raise ConfigError(f"calibration needs torch and transformers ({pip_install('vllm')}): {error}") from error
        if not (directory / "config.json").is_file():
            raise ConfigError(f"{directory} is no model directory: it has no config.json")
        self.torch = torch
        self.directory = directory
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval().requires_grad_(False)

    def token_ids(self, text: str) -> list[int]:
        """Of text, without special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def context_kv(self, ids: Sequence[int]) -> Array:
        """KV of a context as an engine keeps it: bfloat16 bits [L, 2, H, T, D]."""
        from transformers import DynamicCache

        cache = DynamicCache()
        with self.torch.no_grad():
            self.model(self.torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        layers = [(layer.keys, layer.values) for layer in cache.layers]
        shapes = {tuple(tensor.shape[1:]) for pair in layers for tensor in pair}
        if len(shapes) != 1 or next(iter(shapes))[1] != len(ids):
            raise ConfigError(f"only models with the same full attention in all layers: KV here is {sorted(shapes)}")
        stacked = self.torch.stack([self.torch.stack([k[0], v[0]]) for k, v in layers])
        return np.asarray(stacked.bfloat16().view(self.torch.int16).numpy().view(np.uint16))

    def log_probs(self, kv: Any, ids: Sequence[int]) -> Any:
        """Log probabilities [T, V] after each of `ids`, which follow the context whose KV is given: a float32 tensor
        [L, 2, H, T, D], or an array of bfloat16 bits."""
        from transformers import DynamicCache

        if isinstance(kv, np.ndarray):
            kv = self.torch.from_numpy(widen(kv))
        cache = DynamicCache()
        for layer in range(len(kv)):
            cache.update(kv[layer, 0][None], kv[layer, 1][None], layer)
        logits = self.model(self.torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0]
        return self.torch.log_softmax(logits.float(), -1)

    def inverse_wavelengths(self) -> npt.NDArray[np.float64]:
        """Of RoPE; empty where keys are not turned in a way we know, which a shifted run has to confirm."""
        found = [m.inv_freq for m in self.model.modules() if hasattr(m, "inv_freq")]
        if not found or any(f.shape != found[0].shape or not bool((f == found[0]).all()) for f in found):
            return np.zeros(0)
        waves = found[0].double().numpy()
        ids = self.torch.arange(100, 116)[None]
        keys = [self._first_keys(ids, shift) for shift in (0, 37)]
        plain = [unturn(k, planes.angles(s + np.arange(16), waves)) for k, s in zip(keys, (0, 37), strict=True)]
        same = float(np.abs(plain[0] - plain[1]).max()) < 1e-3 * float(np.abs(plain[0]).max())
        return waves if same else np.zeros(0)

    def _first_keys(self, ids: Any, shift: int) -> Array:
        from transformers import DynamicCache

        cache = DynamicCache()
        positions = self.torch.arange(shift, shift + ids.shape[1])[None]
        with self.torch.no_grad():
            self.model(ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return np.asarray(cache.layers[0].keys[0].float().numpy())


def calibrate(
    model: LoadedModel, texts: Sequence[str], windows: Windows, report: Report, num_ranks: int = 1
) -> list[TableFile]:
    """Tables of klt and cachegen, which so many ranks can share out. Raises ConfigError for too little text."""
    cut = _cut(model, texts, windows)
    total = (windows.samples + 1) * (len(cut) - 1) + 2 + len(TRIALS)
    done = 0

    def step(what: str) -> None:
        nonlocal done
        report(what, done, total)
        done += 1

    step("positions")
    waves = model.inverse_wavelengths()
    moments: Moments | None = None
    histograms: Histograms | None = None
    for ids in cut[:-1]:
        step("keys and values")
        kv = model.context_kv(ids[: windows.context])
        values = widen(kv)
        moments = moments or Moments((*kv.shape[:3], kv.shape[4]), waves, num_ranks)
        histograms = histograms or Histograms((*kv.shape[:3], kv.shape[4]))
        moments.add_values(values[:, :, :, EXACT:], EXACT)
        histograms.add(values[:, :, :, EXACT:])
        for sample in range(windows.samples):
            step("gradients")
            gradients = _gradients(model, values, ids[windows.context :], seed=sample)
            moments.add_gradients(gradients[:, :, :, EXACT:], EXACT, windows.probe)
    assert moments is not None and histograms is not None, "_cut gives two windows at least"
    found = moments.result()
    steps, measured = _set_steps(model, found, cut[-1], windows, step)
    facts = {"model": model.directory.name, "tokens": windows.context * (len(cut) - 1), "kl_by_step": measured}
    report("done", total, total)
    return [make_klt(found, steps, facts), *histograms.tables({"model": model.directory.name})]


def _cut(model: LoadedModel, texts: Sequence[str], windows: Windows) -> list[list[int]]:
    """Windows of token ids, as evenly from the texts as they allow; the last one from the last text that has one."""
    size = windows.context + windows.probe
    by_text = [model.token_ids(text) for text in texts]
    pieces = [[ids[i : i + size] for i in range(0, len(ids) - size + 1, size)] for ids in by_text]
    cut = [p[i] for i in range(max(map(len, pieces), default=0)) for p in pieces if i < len(p)]
    if len(cut) < 2:  # short texts: one after another
        joined = [token for ids in by_text for token in ids]
        cut = [joined[i : i + size] for i in range(0, len(joined) - size + 1, size)]
    if len(cut) < 2:
        have = sum(map(len, by_text))
        raise ConfigError(f"calibration text has {have} tokens; at least {2 * size} are needed, better {7 * size}")
    return cut[: windows.count]


def _gradients(model: LoadedModel, values: Array, ids: Sequence[int], seed: int) -> Array:
    torch = model.torch
    leaf = torch.from_numpy(values).requires_grad_()
    log_probs = model.log_probs(leaf, ids)
    chosen = torch.multinomial(log_probs.detach().exp(), 1, generator=torch.Generator().manual_seed(seed))
    (gradient,) = torch.autograd.grad(log_probs.gather(1, chosen).sum(), leaf)
    return np.asarray(gradient.numpy())


def _set_steps(
    model: LoadedModel, found: Statistics, ids: Sequence[int], windows: Windows, step: Callable[[str], None]
) -> tuple[dict[int, float], dict[str, float]]:
    """Steps for TARGET_KL by what three trials measure, on a log-log line between and beyond them."""
    step("held-out window")
    context, probe = ids[: windows.context], ids[windows.context :]
    kv = model.context_kv(context)
    with model.torch.no_grad():
        reference = model.log_probs(kv, probe)
    base = found.expected_step(TARGET_KL[4])
    tried = [base * trial for trial in TRIALS]
    tables = make_klt(found, dict(enumerate(tried, 1)), {})
    costs = []
    for level in range(1, len(tried) + 1):
        step("measured KL")
        codec = KltCodec(level, MemoryTables(tables))
        with model.torch.no_grad():
            costs.append(mean_kl(reference, model.log_probs(through(codec, kv), probe)))
    x, y = np.log(costs), np.log(tried)
    slope = [(y[1] - y[0]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])]

    def at(kl: float) -> float:
        i = 0 if np.log(kl) < x[1] else 1
        return float(np.exp(y[1] + (np.log(kl) - x[1]) * slope[i]))

    return {level: at(kl / OTHER_TEXT) for level, kl in TARGET_KL.items()}, {
        f"{s:.6g}": c for s, c in zip(tried, costs, strict=True)
    }


def mean_kl(reference: Any, other: Any) -> float:
    """Mean over positions of KL(reference || other), both log probabilities [T, V]."""
    return float((reference.exp() * (reference - other)).sum(-1).mean())


def through(codec: Any, kv: Array, chunk: int = CHUNK) -> Array:
    """KV [L, 2, H, T, D] (bfloat16 bits) as it comes back from a codec, chunk by chunk."""
    out = np.empty_like(kv)
    for first in range(0, kv.shape[3], chunk):
        piece = np.ascontiguousarray(kv[:, :, :, first : first + chunk])
        out[:, :, :, first : first + chunk] = roundtrip(codec, piece, first)[0]
    return out


def roundtrip(codec: Any, piece: Array, first_token: int) -> tuple[Array, int]:
    """One chunk (bfloat16 bits) through a codec, and its payload's length."""
    values = piece.reshape(-1).view(np.uint8)
    spec = ChunkSpec(dtype="bfloat16", shape=piece.shape, first_token=first_token)
    encoded = codec.encode(values, spec)
    header = FrameHeader(
        codec=encoded.codec, codec_version=encoded.codec_version, level=encoded.level, dtype=spec.dtype,
        shape=spec.shape, num_tokens=spec.shape[3], first_token=first_token, raw_bytes=values.nbytes,
        payload_bytes=len(encoded.payload), identity=bytes(16), tables=encoded.tables, key=bytes(32), payload_xxh3=0,
    )  # fmt: skip
    out = np.empty_like(values)
    codec.decode(memoryview(encoded.payload), header, out)
    return out.view(np.uint16).reshape(piece.shape), len(encoded.payload)


def widen(kv: Array) -> Array:
    """bfloat16 bits → float32."""
    return to_float(np.ascontiguousarray(kv).reshape(-1).view(np.uint8), "bfloat16").reshape(kv.shape)


def narrow(values: Array) -> Array:
    """float32 → bfloat16 bits."""
    return from_float(values, "bfloat16").view(np.uint16).reshape(values.shape)
