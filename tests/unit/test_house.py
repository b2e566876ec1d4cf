"""The rules of the house, read off the source: who imports whom, how long a file may be, what is generated."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import twostroke

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "twostroke" / "v1"
SERVICES = ("router", "prefill", "decode", "kvstore")
MAX_LINES = 300
STACK = (
    *("grpcio", "grpcio-tools", "protobuf", "uvloop", "torch"),
    *("flashinfer-python", "redis", "opentelemetry-sdk", "pytest-asyncio"),
)


@cache
def sources(*folders: str) -> tuple[Path, ...]:
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return tuple(sorted(path for path in found if GENERATED not in path.parents))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[str]:
    """Every module that a file names in an import, at its top or inside a function."""
    for node in ast.walk(tree(path)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield module
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.ImportFrom():
                pytest.fail(f"{name(path)} imports relatively")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def importers(package: str, *folders: str) -> set[str]:
    return {
        name(path)
        for path in sources(*folders)
        if any(each == package or each.startswith(f"{package}.") for each in imports(path))
    }


def below(*places: str) -> set[str]:
    return {name(path) for path in sources("twostroke", "services") if name(path).startswith(places)}


def test_the_library_never_imports_a_service() -> None:
    assert not importers("services", "twostroke")


@pytest.mark.parametrize("service", SERVICES)
def test_services_never_import_each_other(service: str) -> None:
    assert importers(f"services.{service}", "services") <= below(f"services/{service}/")


def test_only_the_engine_imports_torch() -> None:
    assert importers("torch", "twostroke", "services") <= below("twostroke/engine/")


def test_only_the_engine_and_the_ways_blocks_move_import_numpy() -> None:
    assert importers("numpy", "twostroke", "services") <= below("twostroke/engine/", "twostroke/kv/")


def test_the_engine_knows_no_text_and_no_network() -> None:
    for package in ("grpc", "aiohttp", "twostroke.text", "twostroke.rpc", "twostroke.wire", "twostroke.v1"):
        assert not importers(package, "twostroke/engine"), package


def test_nothing_unpickles() -> None:
    assert not importers("pickle", "twostroke", "services")
    loads = [name(path) for path in sources("twostroke", "services") if "torch.load(" in path.read_text()]
    assert not loads


def loaded_by(module: str) -> set[str]:
    """Top-level packages in a fresh process that imported this module."""
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    return set(answer.stdout.split())


@pytest.mark.parametrize("module", ["services.router.assembly", "services.kvstore.assembly", "twostroke.cli.up"])
def test_router_store_and_launcher_start_without_torch_and_numpy(module: str) -> None:
    assert not loaded_by(module) & {"torch", "numpy", "gguf", "safetensors", "transformers"}


@pytest.mark.parametrize("service", ["prefill", "decode"])
def test_a_worker_is_told_wrong_settings_before_it_loads_torch(service: str) -> None:
    assert "torch" not in loaded_by(f"services.{service}.__main__")


def test_the_client_needs_grpc_and_protobuf_only() -> None:
    ours = {"twostroke", "grpc", "google", "grpc_status"}
    third_party = (
        loaded_by("twostroke.client") - loaded_by("asyncio, grpc, grpc.aio") - ours - set(sys.stdlib_module_names)
    )
    assert not {package for package in third_party if not package.startswith("_")}


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_has_the_same_floor_plan(service: str) -> None:
    folder = ROOT / "services" / service
    assert {path.name for path in folder.glob("*.py")} >= {"__main__.py", "assembly.py", "settings.py", "service.py"}


def test_services_is_a_namespace_so_that_it_shadows_nobody() -> None:
    assert not (ROOT / "services" / "__init__.py").exists()


def test_every_file_is_short() -> None:
    lengths = {
        name(path): len(path.read_text().splitlines()) for path in sources("twostroke", "services", "bench", "tests")
    }
    assert not {path: lines for path, lines in lengths.items() if lines > MAX_LINES}


def test_every_file_says_what_it_is_for() -> None:
    assert not [name(path) for path in sources("twostroke", "services", "bench") if not ast.get_docstring(tree(path))]


def test_nothing_is_global_and_no_input_is_checked_by_assert() -> None:
    for path in sources("twostroke", "services"):
        banned = [node.lineno for node in ast.walk(tree(path)) if isinstance(node, ast.Global | ast.Assert)]
        assert not banned, f"{name(path)}: lines {banned}"


def test_no_file_names_a_package_index_or_a_folder_of_one_machine() -> None:
    banned = ["pypi" + ".org", "python" + "hosted", "download." + "pytorch", "/opt/" + "wheels", "/work" + "/"]
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for path in map(ROOT.joinpath, listed.stdout.splitlines()):
        if path.is_file() and path.stat().st_size < 1 << 20:
            text = path.read_bytes().decode(errors="ignore")
            assert not [word for word in banned if word in text], name(path)


def test_generated_code_is_what_the_contracts_say(tmp_path: Path) -> None:
    protos = sorted((ROOT / "protos").rglob("*.proto"))
    outputs = [f"--{plugin}_out={tmp_path}" for plugin in ("python", "grpc_python", "mypy", "mypy_grpc")]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # where the mypy plugin is
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}", *outputs, *map(str, protos)]
    subprocess.run(command, check=True, env={**os.environ, "PATH": path}, capture_output=True)
    made = {each.name: each.read_text() for each in (tmp_path / "twostroke" / "v1").iterdir()}
    kept = {each.name: each.read_text() for each in GENERATED.glob("*_pb2*")}
    assert sorted(made) == sorted(kept)
    assert [file for file in made if made[file] != kept[file]] == [], "run `make protos`"


def test_the_whole_stack_stands_in_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    where = {
        package: {group for group, needs in groups.items() if any(names(need, package) for need in needs)}
        for package in STACK
    }
    assert all(where.values()), where
    assert where["flashinfer-python"] == {"gpu"}
    assert where["torch"] == {"cpu"}


def names(requirement: str, package: str) -> bool:
    return requirement.startswith(package) and not requirement[len(package) :].startswith(("-", "_"))


def test_the_version_is_told_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert twostroke.__version__ == project["version"]


def test_every_pinned_release_satisfies_what_the_project_asks_for() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [
        project["dependencies"],
        *(needs for group, needs in project["optional-dependencies"].items() if group != "gpu"),
    ]
    for requirement in (Requirement(need) for needs in groups for need in needs):
        pin = pins.get(canonicalize_name(requirement.name))
        assert requirement.name == "twostroke" or (pin and requirement.specifier.contains(pin)), requirement
