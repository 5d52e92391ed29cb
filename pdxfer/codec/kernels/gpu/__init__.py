"""The loops in Triton, for values that are on a GPU. Only kernels.py is for others to import."""
