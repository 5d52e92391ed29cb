"""The class vLLM loads, in two halves: scheduler (EngineCore) and worker. The only importer of vllm."""
