"""Backends: arithmetic on a CPU with torch alone, on a CPU with our own kernels, and on a GPU with FlashInfer."""
