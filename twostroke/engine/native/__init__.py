"""Our own kernels for CPUs: C, compiled where they run and called through ctypes."""
