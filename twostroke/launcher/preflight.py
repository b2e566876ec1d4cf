"""Everything that can be known to go wrong, looked at before anything starts."""

from __future__ import annotations

import importlib.util
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from twostroke.access.keyfile import InvalidKeyFile, parse, read
from twostroke.launcher.models import find_model, hub_id
from twostroke.launcher.options import MAX_PORT, UpOptions
from twostroke.launcher.plan import Place, Site, join_address
from twostroke.launcher.refusal import Refusal

SHARED_MEMORY = Path("/dev/shm")
MIB = 1 << 20
_NEEDED = ("aiohttp", "grpc_health", "safetensors", "tokenizers", "torch", "uvloop")  # one of each extra


def survey(options: UpOptions) -> Site:
    """Where the cluster of these options will lie on this machine. Raises Refusal before anything was started."""
    _require_packages()
    model = find_model(options.model)
    api_keys = options.api_keys and _sound_keys(options.api_keys)
    arena = _arena(options)
    http, grpc, *inner = _ports(options)
    kvstore, *workers = (Place.local(port) for port in inner)
    return Site(
        model=model,
        name=options.name or hub_id(options.model),
        arena_directory=arena,
        kvstore=kvstore,
        prefill=tuple(workers[: options.prefill]),
        decode=tuple(workers[options.prefill :]),
        router=Place.local(grpc, options.host),
        http_listen=join_address(options.host, http),
        api_keys=api_keys,
    )


def state_directory(options: UpOptions, site: Site) -> Path:
    """The folder of this cluster's logs, made if need be; the HTTP port tells clusters side by side apart.

    Raises: Refusal, when it cannot be written to.
    """
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    base = options.state_directory or Path(home) / "twostroke"
    folder = base / site.http_listen.rpartition(":")[2]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refusal(
            f"cannot make the log folder {folder}: {error.strerror}", "choose another with --state-directory"
        ) from error
    if not os.access(folder, os.W_OK):
        raise Refusal(f"cannot write to the log folder {folder}", "choose another with --state-directory")
    return folder


def _require_packages() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise Refusal(
            f"packages are missing: {', '.join(missing)}",
            'run `make up` in the checkout, or pip install ".[cpu]" there',
        )


def _sound_keys(path: Path) -> Path:
    try:
        parse(read(path))
    except InvalidKeyFile as error:
        raise Refusal(f"--api-keys {path}: {error}", "mend what the message names") from error
    return path.absolute()  # a link stays one: the file behind it may be changed for another


def _arena(options: UpOptions) -> Path:
    """The folder of the arena.

    Only what can never fit is refused here: what a killed cluster left behind is removed by the store as it starts, and
    the store then looks at the room that is really free.
    """
    folder = options.arena_directory or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir()))
    if not folder.is_dir():
        raise Refusal(f"the arena folder {folder} does not exist", "make it, or name another with --arena-directory")
    status = os.statvfs(folder)
    found = status.f_blocks * status.f_frsize
    if options.arena_size > found:
        raise Refusal(
            f"the arena needs {options.arena_size // MIB:,} MiB in {folder}, which has {found // MIB:,} MiB",
            "enlarge it (docker run --shm-size), set a smaller --arena-bytes, or name another --arena-directory",
        )
    return folder.resolve()


def _ports(options: UpOptions) -> tuple[int, ...]:
    """HTTP, gRPC, store and workers: the first two as told, the others the next free ones on loopback.

    All are held until all are known, so that no two are the same.
    """
    with ExitStack() as held:
        http = _told(held, options.host, options.port, "--port")
        wanted = options.grpc_port if options.grpc_port is not None else (options.port and options.port + 1)
        grpc = _told(held, options.host, wanted, "--port" if options.grpc_port is None else "--grpc-port")
        after = _free_after(held, max(http, grpc))
        inner = tuple(next(after) for _ in range(1 + options.prefill + options.decode))
    return (http, grpc, *inner)


def _told(held: ExitStack, host: str, port: int, flag: str) -> int:
    bound = _bind(held, host, port)
    if bound is None:
        raise Refusal(f"port {port} on {host} is in use or not ours to take", f"choose another with {flag}")
    return bound


def _free_after(held: ExitStack, port: int) -> Iterator[int]:
    for candidate in range(port + 1, MAX_PORT + 1):
        if _bind(held, "127.0.0.1", candidate) is not None:
            yield candidate
    raise Refusal(f"no free ports are left above {port}", "choose a lower --port")


def _bind(held: ExitStack, host: str, port: int) -> int | None:
    """Hold a port the way the services will; None when somebody else has it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise Refusal(f"cannot listen on {host}: {error.strerror}", "give --host an address of this machine") from error
    listener = held.enter_context(socket.socket(family, kind, protocol))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port whose last user just left is free
    try:
        listener.bind(address)
        listener.listen(1)
    except OSError:
        return None
    bound: int = listener.getsockname()[1]
    return bound
