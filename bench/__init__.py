"""Benchmarks: one file each, run as `python -m bench.NAME`; what several of them need lies beside them."""
