"""Value types and plumbing that everything else rests on. Imports nothing of ours."""
