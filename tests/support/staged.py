"""A CPU that plays the device to which pages are staged."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch


class HostStream:
    """A CopyStream whose work is done as soon as it is queued."""

    device = torch.device("cpu")
    pins = False

    def behind_compute(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()
