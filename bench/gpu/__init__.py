"""`make gpu-check`: everything that only a GPU can show, in at most ten minutes; `--emulate` rehearses it on a CPU.

Each stage is a process with a time limit of its own. What it finds is on disk as soon as it is found, so that a stage
that fails, hangs or takes the device down with it loses nothing of what came before.
"""
