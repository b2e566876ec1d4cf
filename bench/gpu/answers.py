"""An engine on the device: right answers, with and without captured steps, and how fast beside transformers."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Sequence
from typing import Any

import torch

from bench.client import Answer, Arrival, steady_rate
from bench.gpu.findings import Finding
from bench.gpu.ground import Ground
from bench.gpu.parity import compare_logits, judge, on_cpu, on_device
from twostroke.engine.engine import Engine, EngineRequest, EngineSettings
from twostroke.engine.mode import KvMode, WeightMode
from twostroke.engine.weights import LoadedModel
from twostroke.kv.keys import root_key
from twostroke.types import SamplingParams, StopConditions

_PROMPT_TOKENS, _NEW_TOKENS = 128, 128
_BATCHES = (1, 8, 32, 64, 128, 256)
_PEER_BATCHES = (1, 32, 256)


def run(ground: Ground) -> None:
    """Compare with the CPU, then measure, then let transformers do the same."""
    with ground.notes.part("logits in f16"):
        mode = WeightMode.F16
        compare_logits(ground, on_device(ground, mode), on_cpu(ground, mode), _prompt(ground.size(400, 40), seed=1))
    loaded, reference = on_device(ground), on_cpu(ground)
    with ground.notes.part("logits in bf16"):
        compare_logits(ground, loaded, reference, _prompt(ground.size(400, 40), seed=1))
    for graphs in (False, True):
        with ground.notes.part(f"engine, graphs {graphs}"):
            asyncio.run(_engine(ground, loaded, reference, graphs=graphs))
    del loaded
    gc.collect()
    with ground.notes.part("transformers"):
        _transformers(ground)


async def _engine(ground: Ground, loaded: LoadedModel, reference: LoadedModel, *, graphs: bool) -> None:
    name = "engine with graphs" if graphs else "engine"
    settings = EngineSettings(
        pages=ground.size(20_001, 200),
        tokens_per_step=ground.size(2_048, 64),
        max_running=ground.size(256, 8),
        graphs=graphs,
    )
    began = time.perf_counter()
    form = loaded.kv_format(kv=KvMode.BF16)
    async with Engine.start(settings, loaded.model, form) as engine:
        ground.notes.add(Finding(f"{name}, start", time.perf_counter() - began, "s"))
        prompts = [_prompt(5 + 9 * each, seed=each) for each in range(ground.size(8, 2))]
        asked = await asyncio.gather(*(_answer(engine, prompt, ground.size(64, 6)) for prompt in prompts))
        judge(ground, name, reference, {prompt: ids for prompt, (_, ids) in zip(prompts, asked, strict=True)})
        first, _ = await _answer(engine, _prompt(ground.size(1_024, 60), seed=99), 1)
        ground.notes.add(Finding(f"{name}, first token of {ground.size(1_024, 60)}", 1e3 * first.first_seconds, "ms"))
        for batch in [ground.size(each, min(each, 4)) for each in (_BATCHES if graphs else _PEER_BATCHES)]:
            together = await asyncio.gather(
                *(
                    _answer(engine, _prompt(ground.size(_PROMPT_TOKENS, 8), seed=1_000 * batch + each), _new(ground))
                    for each in range(batch)
                )
            )
            rate = steady_rate([answer for answer, _ in together])
            ground.notes.add(Finding(f"{name}, decode of {batch} streams", rate, "tok/s"))
            ground.notes.add(Finding(f"{name}, time per token of {batch} streams", 1e3 * batch / rate, "ms"))


def _new(ground: Ground) -> int:
    return ground.size(_NEW_TOKENS, 24)


async def _answer(engine: Engine, prompt: tuple[int, ...], tokens: int) -> tuple[Answer, tuple[int, ...]]:
    request = EngineRequest(
        id="check",
        prompt=prompt,
        root=root_key(engine.format.digest, f"{prompt}"),
        sampling=SamplingParams(temperature=0.0),
        stops=StopConditions(max_tokens=tokens, ignore_eos=True),
    )
    began, ids, arrivals = time.perf_counter(), [], []
    async with engine.submit(request) as outputs:
        async for output in outputs:
            ids += [token.id for token in output.tokens]
            if output.tokens:
                arrivals.append(Arrival(time.perf_counter(), len(ids)))
    return Answer(began, tuple(arrivals)), tuple(ids)


def _prompt(length: int, *, seed: int) -> tuple[int, ...]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(300, 49_000, (length,), generator=draw).tolist())


def _transformers(ground: Ground) -> None:
    """The same model, batches and lengths through `generate`, in bfloat16 with its default attention."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(ground.model, dtype=torch.bfloat16, local_files_only=True)
    model = model.to(ground.device).eval()
    for batch in [ground.size(each, min(each, 4)) for each in _PEER_BATCHES]:
        prompts = [_prompt(ground.size(_PROMPT_TOKENS, 8), seed=each) for each in range(batch)]
        rate = _generated(ground, model, prompts)
        ground.notes.add(Finding(f"transformers, decode of {batch} streams", rate, "tok/s"))


def _generated(ground: Ground, model: Any, prompts: Sequence[tuple[int, ...]]) -> float:
    """Tokens a second behind the first: the time for one token is taken off."""
    ids = torch.tensor(prompts, device=ground.device)
    times = []
    for tokens in (1, 1, _new(ground)):  # the first warms up
        ground.synchronize()
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                pad_token_id=0,
            )
        ground.synchronize()
        times.append(time.perf_counter() - began)
    return len(prompts) * (_new(ground) - 1) / (times[2] - times[1])
