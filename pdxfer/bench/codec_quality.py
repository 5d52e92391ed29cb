"""What a codec does to a model's answers: KV of real contexts through it, then the tokens that follow, teacher-forced.

`Material` holds contexts, their KV as engines keep it (bfloat16), and the reference log probabilities of the probe with
that KV. `measure` gives ratio, KL with its 95 % interval, top-1 agreement and perplexity change over all positions.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pdxfer.bench.codec_arms import Arm
from pdxfer.codec.calibrate_model import LoadedModel
from pdxfer.core.errors import ConfigError

Array = npt.NDArray[Any]
Prefill = Callable[[Mapping[str, Sequence[int]]], Mapping[str, Array]]
"""Token ids of each context → their KV, bfloat16 bits [L, 2, H, T, D]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One text."""

    name: str
    kv: Array
    """bfloat16 bits [L, 2, H, T, D]."""
    probe: list[int]
    """Tokens after the context."""
    reference: Any
    """Log probabilities [T, V] after each of them, with `kv` as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Of one arm over all contexts."""

    ratio: float
    """Bytes of bfloat16 KV by bytes of payloads."""
    kl: float
    kl_half_width: float
    """Of the 95 % interval, positions taken as independent."""
    kl_by_text: dict[str, float]
    top1: float
    """Part of positions with the same most likely token."""
    ppl_change: float
    """Relative change of the perplexity on the text that really follows."""


class Material:
    """Everything that is compared against."""

    def __init__(
        self, model: LoadedModel, texts: Mapping[str, str], context: int, positions: int, prefill: Prefill | None = None
    ) -> None:
        """`prefill`: where KV comes from, default the model itself."""
        self.model = model
        ids = {name: model.token_ids(text) for name, text in texts.items()}
        for name, found in ids.items():
            if len(found) < context + positions:
                raise ConfigError(f"text {name} has {len(found)} tokens; {context + positions} are needed")
        prefill = prefill or (lambda wanted: {name: model.context_kv(found) for name, found in wanted.items()})
        kv = prefill({name: found[:context] for name, found in ids.items()})
        self.contexts = [self._prepare(n, kv[n], ids[n][context : context + positions]) for n in ids]

    def _prepare(self, name: str, kv: Array, probe: list[int]) -> Context:
        with self.model.torch.no_grad():
            reference = self.model.log_probs(kv, probe)
        print(f"context {name}: {kv.shape[3]} tokens, {len(probe)} positions", file=sys.stderr)
        return Context(name=name, kv=kv, probe=probe, reference=reference)

    @property
    def num_positions(self) -> int:
        """Of all contexts."""
        return sum(len(c.probe) for c in self.contexts)


def measure(material: Material, arm: Arm, chunk: int) -> Quality:
    """One arm over all contexts."""
    torch = material.model.torch
    kls, same, nll, nll_reference, coded, by_text = [], [], [], [], 0, {}
    for context in material.contexts:
        out = np.empty_like(context.kv)
        for first in range(0, out.shape[3], chunk):
            piece = np.ascontiguousarray(context.kv[:, :, :, first : first + chunk])
            out[:, :, :, first : first + chunk], num_bytes = arm.through(piece, first)
            coded += num_bytes
        if np.array_equal(out, context.kv):
            log_probs = context.reference
        else:
            with torch.no_grad():
                log_probs = material.model.log_probs(out, context.probe)
        kl = (context.reference.exp() * (context.reference - log_probs)).sum(-1).numpy()
        kls.append(kl)
        by_text[context.name] = float(kl.mean())
        same.append((log_probs.argmax(-1) == context.reference.argmax(-1)).numpy())
        following = torch.tensor(context.probe[1:])[:, None]
        nll.append(-log_probs[:-1].gather(1, following).numpy())
        nll_reference.append(-context.reference[:-1].gather(1, following).numpy())
    every = np.concatenate(kls)
    return Quality(
        ratio=sum(c.kv.nbytes for c in material.contexts) / coded,
        kl=max(float(every.mean()), 0.0),
        kl_half_width=float(1.96 * every.std() / np.sqrt(every.size)),
        kl_by_text=by_text,
        top1=float(np.concatenate(same).mean()),
        ppl_change=float(np.exp(np.concatenate(nll).mean() - np.concatenate(nll_reference).mean()) - 1),
    )
