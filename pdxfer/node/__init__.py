"""The runtime inside one worker: sends and receives units over channels. Knows nothing of vllm."""
