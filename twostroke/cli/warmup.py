"""`twostroke warmup`: build ahead what a model's first start on this machine would have to wait for."""

from __future__ import annotations

import time
from collections.abc import Sequence

from twostroke.cli.terminal import note, show
from twostroke.engine.device import Device
from twostroke.engine.mode import WeightMode
from twostroke.settings import Parser


def run(argv: Sequence[str]) -> int:
    """Run the verb. Raises TwostrokeError when the device cannot be used."""
    parser = Parser(prog="twostroke warmup", description=__doc__)
    parser.add_argument("--model", default="", help="as for `twostroke up`; the packaged one by default")
    parser.add_argument("--device", type=Device, choices=list(Device), default=Device.AUTO, help="where it will run")
    parser.add_argument("--weights", type=WeightMode, choices=list(WeightMode), help="by default those of the device")
    told = parser.parse_known(argv)

    # Only now: these load torch.
    from twostroke.engine.backends.choice import choose_backend
    from twostroke.engine.cuda.kernels import prepare_kernels
    from twostroke.engine.weights import read_config
    from twostroke.launcher.models import find_model

    began = time.perf_counter()
    backend = choose_backend(told.device, mode=told.weights)
    prepare_kernels(backend, read_config(find_model(told.model)), note)
    show(f"{backend.name} is ready on {backend.device} after {time.perf_counter() - began:.1f} s")
    return 0
