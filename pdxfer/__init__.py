"""pdxfer: stream the KV cache of a prompt from a prefill vLLM engine into a decode vLLM engine.

Importing the package is cheap: it pulls in neither torch, vllm nor nixl.
"""

__version__ = "0.1.0"
