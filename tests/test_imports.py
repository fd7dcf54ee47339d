"""Imports point one way, planning needs neither torch nor deepspeed, and commands find the right packages."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import ROOT, run

# package -> packages of this project that it may import beside itself
ALLOWED = {
    "recipes": set(),
    "ds_configs": {"recipes"},
    "modeling": {"recipes"},
    "data": {"recipes"},
    "launch": {"recipes", "ds_configs", "modeling", "data"},
}
WITHOUT_TORCH = {"recipes", "ds_configs", "modeling.cost"}
FILES = sorted(file for package in ALLOWED for file in (ROOT / package).rglob("*.py"))
IDS = [str(file.relative_to(ROOT)) for file in FILES]
COMMANDS = [file for file in FILES if file.parent.name == "launch" and "__main__" in file.read_text()]


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all imported modules, also of imports inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield node.module or ""


def test_every_package_is_walked():
    packages = {file.parent.name for file in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages == set(ALLOWED) and {file.relative_to(ROOT).parts[0] for file in FILES} == packages
    assert len(COMMANDS) >= 2


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_imports_point_one_way(file):
    package = file.relative_to(ROOT).parts[0]
    names = {name.split(".")[0] for name in imported(ast.parse(file.read_text()))}
    wrong = names & (set(ALLOWED) | {"tests"}) - ALLOWED[package] - {package}
    assert not wrong, (
        f"{package} may import {sorted(ALLOWED[package]) or 'none of the others'}, but {file.name} imports {sorted(wrong)}"
    )


def modules_without_torch() -> list[str]:
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in FILES
    ]
    return [m for m in modules if m in WITHOUT_TORCH or m.split(".")[0] in WITHOUT_TORCH]


def test_planning_loads_neither_torch_nor_deepspeed():
    """Also not by way of another module, nor when a recipe is resolved against a ds_config."""
    modules = modules_without_torch()
    assert len(modules) > 15
    program = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
from ds_configs.resolver import Machine, resolve
from recipes import catalog
resolve(catalog.load(catalog.DEFAULT_RECIPE), "zero1", 2, Machine("cpu", fp16=False, bf16=True, compiler=True, libaio=False))
heavy = {{"torch", "deepspeed", "transformers", "datasets", "numpy"}} & set(sys.modules)
sys.exit(f"loaded {{sorted(heavy)}}" if heavy else 0)
"""
    done = run([sys.executable, "-c", program], timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("file", COMMANDS, ids=[file.name for file in COMMANDS])
def test_commands_replace_their_own_folder_on_the_path(file):
    """`python launch/x.py` puts launch/ first on the path; it has to give way before the first import from this project."""
    body = ast.parse(file.read_text()).body
    replaced = [
        i for i, node in enumerate(body) if isinstance(node, ast.If) and "sys.path[0] =" in ast.unparse(node)
    ]
    ours = [
        i for i, node in enumerate(body) if set(ALLOWED) & {name.split(".")[0] for name in imported(node)}
    ]
    assert replaced and replaced[0] < min(ours), "set sys.path[0] before importing from the project"


@pytest.mark.parametrize("file", COMMANDS, ids=[file.name for file in COMMANDS])
def test_commands_explain_themselves_from_any_directory(file, tmp_path):
    """--help works from another directory, and with launch/ as the first entry of the path."""
    done = run([sys.executable, str(file), "--help"], env={"PYTHONPATH": ""}, cwd=tmp_path, timeout=60)
    assert done.returncode == 0 and "examples:" in done.stdout, done.stdout


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_no_module_shadows_the_standard_library(package):
    """Matters for launch/, which stands on the path of its commands, and for readers everywhere."""
    names = {file.stem for file in Path(ROOT / package).glob("*.py")} - {"__init__"}
    assert not names & sys.stdlib_module_names
