"""Where the CUDA compiler, its headers and its libraries are, for FlashInfer's builds; nothing is installed.

CUDA comes in one folder, or in pieces as Python packages. The compiler says itself where it is: its name on the PATH
may be a script's. Headers and libraries that are not beside it are looked for among the packages.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path


def compiler_environment(links: Path) -> dict[str, str]:
    """Return what to add to the environment; `links` is a folder to be made for names that linkers look for."""
    home = _cuda_home()
    if home is None:
        return {}
    links.mkdir(parents=True, exist_ok=True)
    packaged = list(_packaged())
    for name, found in (("libcuda.so", _driver()), ("libcudart.so", _runtime(home, packaged))):
        if found is not None and not (links / name).exists():
            (links / name).symlink_to(found)
    includes = [f"-I{folder / 'include'}" for folder in packaged if (folder / "include").is_dir()]
    return {
        "CUDA_HOME": str(home),
        "FLASHINFER_EXTRA_CUDAFLAGS": shlex.join(includes),
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{links}",
    }


def _cuda_home() -> Path | None:
    try:
        dry = subprocess.run(
            ["nvcc", "--dryrun", "-c", "-x", "cu", "/dev/null"], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"^#\$ _HERE_=(.+)$", dry.stderr, re.MULTILINE)
    return Path(found[1]).parent if found else None


def _packaged() -> Iterator[Path]:
    """Folders of CUDA's Python packages: include and lib are below them."""
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        yield from sorted(path.parent for path in Path(root).glob("*/include"))


def _driver() -> Path | None:
    """The driver's library: linkers want it by a name that only development packages install."""
    try:
        listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        listed = ""
    found = re.search(r"libcuda\.so\.1 .*=> (\S+)", listed)
    places = [Path(found[1])] if found else sorted(Path("/usr/local/nvidia").glob("**/libcuda.so.1"))
    return next(iter(places), None)


def _runtime(home: Path, packaged: list[Path]) -> Path | None:
    beside = [home / "lib64" / "libcudart.so", home / "lib" / "libcudart.so"]
    if any(path.exists() for path in beside):
        return None
    return next((path for folder in packaged for path in sorted(folder.glob("lib/libcudart.so*"))), None)
