"""What `pdxfer doctor` looks at. Each check returns findings and raises nothing; none imports torch or vllm."""
