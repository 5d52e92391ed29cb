"""pdxfer: stream the KV cache of a prompt from a prefill vLLM engine into a decode vLLM engine.

Importing the package is cheap: it pulls in neither torch, vllm nor nixl; `pdxfer.LLM` does when it is first named.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdxfer.llm import LLM as LLM

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from pdxfer.llm import LLM

        return LLM
    raise AttributeError(f"module 'pdxfer' has no attribute {name!r}")
