"""Our own kernels for CPUs: a few hundred lines of C, compiled where they run and called through ctypes."""
