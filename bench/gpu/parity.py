"""Whether a GPU's answers are right: a CPU reads them, and no token may score below the best beyond rounding.

The reference has the same weights and float32 activations. Bounds are about twice what emulated kernels, which round
where the device does, made of this model: 0.08 and 0.5 in bf16, 0.01 and 0.06 in f16. A trained model makes less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from bench.gpu.findings import Finding
from bench.gpu.ground import Ground
from bench.gpu.model import write_model
from bench.gpu.scenes import relative_error
from tests.support.forward import all_logits
from tests.support.judge import rejections
from twostroke.engine.backends.choice import Device, choose_backend
from twostroke.engine.cuda.kernels import prepare_kernels
from twostroke.engine.mode import WeightMode
from twostroke.engine.weights import LoadedModel, load_model

ERROR = {WeightMode.BF16: 0.12, WeightMode.F16: 0.02}  # of all logits together, relative
BOUND = {WeightMode.BF16: 0.8, WeightMode.F16: 0.12}  # of one logit, in standard deviations of a row
THREADS = 8


def on_device(ground: Ground, mode: WeightMode = WeightMode.BF16) -> LoadedModel:
    """Load the model where it is measured, with its kernels."""
    backend = ground.backend(mode)
    loaded = load_model(write_model(ground), mode=mode, backend=backend)
    prepare_kernels(backend, loaded.config, print)
    return loaded


def on_cpu(ground: Ground, mode: WeightMode = WeightMode.BF16) -> LoadedModel:
    """Load the model that judges."""
    threads = ground.size(THREADS, 1)
    torch.set_num_threads(threads)
    return load_model(write_model(ground), mode=mode, backend=choose_backend(Device.CPU, mode=mode, threads=threads))


@torch.inference_mode()
def compare_logits(ground: Ground, ours: LoadedModel, reference: LoadedModel, tokens: Sequence[int]) -> None:
    """Note how far the logits of the same tokens lie apart, read in chunks and single tokens."""
    chunks = [ground.size(130, 17), 1, 1]
    found, right, mode = all_logits(ours, tokens, chunks=chunks), all_logits(reference, tokens), ours.mode
    error = relative_error(found, right)
    ground.notes.add(Finding(f"logits in {mode}, relative error", error, "", at_most=ERROR[mode]))
    apart = float((found - right).abs().max() / right.std(dim=1).mean())
    ground.notes.add(Finding(f"logits in {mode}, largest difference", apart, "std", at_most=BOUND[mode]))


def judge(ground: Ground, name: str, reference: LoadedModel, answers: Mapping[tuple[int, ...], Sequence[int]]) -> None:
    """Hold answers, by their prompts, to the reference."""
    wrong = tokens = 0
    for prompt, answer in answers.items():
        scores = all_logits(reference, [*prompt, *answer])[len(prompt) - 1 : -1]
        wrong += len(rejections(scores, answer, bound=BOUND[reference.mode] * float(scores.std(dim=1).mean())))
        tokens += len(answer)
    ground.notes.add(Finding(f"{name}: tokens of {tokens} beyond rounding", float(wrong), "", at_most=0.0))
