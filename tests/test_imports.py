"""Imports point one way between packages and rooms, planning loads no torch, commands run from anywhere."""

from __future__ import annotations

import ast
import graphlib
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import ROOT, deepspeed, run

from launch.experiments.launching import torchrun

# package -> the others that it may import
PACKAGES = {
    "recipes": set(),
    "ds_configs": {"recipes"},
    "modeling": {"recipes"},
    "data": {"recipes"},
    "launch": {"recipes", "ds_configs", "modeling", "data"},
    "tools": {"recipes", "ds_configs", "modeling", "data", "launch"},  # which no other may import
}
# room of launch/ -> the other rooms that it may import; a command (a file at the top) may import them all
_GROUND = {"console", "ranks", "machine", "deepspeed_fixes"}
_TRAINING = {*_GROUND, "records", "checkpoints"}
_TRAINED = {*_TRAINING, "weights", "training"}
_EVERYTHING = {*_TRAINED, "planning", "tables", "evaluation"}
LAUNCH = {
    "console": set(),
    "ranks": {"console"},
    "machine": {"console", "deepspeed_fixes", "ranks"},
    "deepspeed_fixes": set(),
    "planning": {"console", "machine"},
    "checkpoints": {"console", "deepspeed_fixes", "ranks", "machine", "records"},
    "weights": {*_GROUND, "checkpoints"},
    "training": {*_TRAINING, "records"},
    "records": {"console", "ranks", "machine"},
    "tables": {"console", "machine", "planning", "records"},
    "evaluation": _TRAINED,
    "reports": _EVERYTHING,
    "experiments": {*_EVERYTHING, "reports"},
}
# rooms and files of data/, from the ground floor up; each may import what stands in an earlier line
DATA = (
    {"bit_sums", "durable_files", "keyed_random"},
    {"text"},
    {"tokens"},
    {"samples"},
    {"corpus", "prepare"},
    {"loader", "tasks"},
)
WITHOUT_TORCH = ("recipes", "ds_configs", "modeling.cost", "launch.console", "launch.planning")
FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
MODULES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in FILES
}
COMMANDS = sorted((ROOT / "launch").glob("[!_]*.py"))
TOOLS = sorted((ROOT / "tools").glob("[!_]*.py"))


def imported(tree: ast.AST) -> Iterator[str]:
    """Names of all imported modules of this project, also of imports inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"line {node.lineno}: relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else node.module


GRAPH = {
    module: {name for name in imported(ast.parse(file.read_text())) if name.split(".")[0] in PACKAGES}
    for module, file in MODULES.items()
}


def test_every_package_and_room_is_in_the_tables():
    packages = {file.parent.name for file in ROOT.glob("*/__init__.py")} - {"tests"}
    rooms = {path.parent.name for path in ROOT.glob("launch/*/__init__.py")}
    parts = {path.stem for path in (ROOT / "data").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert packages == set(PACKAGES)
    assert rooms == set(LAUNCH)
    assert parts - {"__init__", "__pycache__"} == set().union(*DATA)


def place(module: str) -> tuple[str, str]:
    """Package and room of a module."""
    package, room, *_ = [*module.split("."), ""]
    return package, room


def test_imports_point_one_way():
    floors = {part: floor for floor, parts in enumerate(DATA) for part in parts}
    wrong = []
    for module, names in GRAPH.items():
        package, room = place(module)
        command = MODULES[module].parent.name == "launch"
        for name in names:
            other_package, other_room = place(name)
            allowed = other_package in {package} | PACKAGES[package]
            if package == other_package == "launch" and other_room:
                allowed = other_room in LAUNCH and (command or other_room in {room} | LAUNCH[room])
            if package == other_package == "data" and room and other_room != room:
                allowed = floors[other_room] < floors[room]
            if not allowed:
                wrong.append(f"{module} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other_in_a_circle():
    graphlib.TopologicalSorter({module: GRAPH[module] - {module} for module in MODULES}).prepare()


# What may only fall: tokens of the packages, tokens a code line of what pretrain.py reaches over all its
# imports, files that a tiny run of GPT-2 loads, functions and class bodies (and their files) that it passes
# before the first forward of a layer.
MOST_TOKENS = 346_200
MOST_TOKENS_A_LINE = 8.72
MOST_FILES_LOADED = 116
MOST_FUNCTIONS_PASSED = 724
MOST_FILES_PASSED = 90
APART = (
    *("launch.planning", "launch.tables", "launch.reports", "launch.evaluation", "launch.experiments"),
    *("data.tasks", "data.prepare"),
)
TOKENS = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)


def tokens_and_lines(file: Path) -> tuple[int, int]:
    """Count the tokens of a file, and its lines but for blank ones, comments, docstrings and imports."""
    text = file.read_text()
    lines = {number for number, line in enumerate(text.splitlines(), 1) if line.strip()}
    for node in ast.walk(ast.parse(text)):
        kinds = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            node = node.body[0]
        elif not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        lines -= {*range(node.lineno, node.end_lineno + 1)}
    tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            lines.discard(token.start[0])
        tokens += token.type in TOKENS or token.string.startswith(("f'", 'f"'))  # of Python 3.12, too
    return tokens, len(lines)


def reached_by(module: str) -> set[str]:
    """Return all modules that one imports, and those that they do."""
    reached, queue = {module}, [module]
    while queue:
        module = queue.pop()
        new = GRAPH[module] | {module.rsplit(".", depth)[0] for depth in range(1, module.count(".") + 1)}
        queue += new - reached
        reached |= new
    return reached


def test_training_reaches_no_other_work():
    assert not [module for module in reached_by("launch.pretrain") if module.startswith(APART)]


def test_the_program_grows_no_further():
    product = [module for module in MODULES if not module.startswith("tools")]
    found = sum(tokens_and_lines(MODULES[module])[0] for module in product)
    assert found <= MOST_TOKENS, f"{found:,} tokens"


def test_a_line_holds_no_more():
    counted = [tokens_and_lines(MODULES[module]) for module in reached_by("launch.pretrain")]
    found = sum(tokens for tokens, _ in counted) / sum(lines for _, lines in counted)
    assert found <= MOST_TOKENS_A_LINE, f"{found:.2f} tokens a line"


def test_a_start_passes_no_more(tmp_path):
    """Files that a tiny run loads; functions and files that it passes before a layer's first forward."""
    modules = {str(file) for file in MODULES.values() if file.name != "__init__.py"}
    words = ["launch/pretrain.py", "--tiny", "--steps", "2", "--ds_config", "zero3_offload", "--out"]
    program = f"""
import os, sys
from pathlib import Path
modules = {modules!r}
passed = {{}}
before = []
def profile(frame, event, _):
    code = frame.f_code
    name = code.co_name
    if event != "call" or code.co_filename not in modules or name.startswith("<"):
        return
    if name == "forward" and code.co_filename.startswith({str(ROOT / "modeling")!r}):
        before.extend(passed)
        sys.setprofile(None)
    passed[code.co_filename, code.co_firstlineno] = None
def count(code, leave=os._exit):
    files = {{getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}}
    figures = len(files & modules), len(before), len({{file for file, _ in before}})
    Path({str(tmp_path / "figures")!r}).write_text(" ".join(map(str, figures)))
    leave(code)
os._exit = count
sys.argv = {[*words, str(tmp_path / "run")]!r}
sys.setprofile(profile)
from launch import pretrain
pretrain.main()
count(0)
"""
    done = run([sys.executable, "-c", program], timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]
    loaded, functions, files = map(int, (tmp_path / "figures").read_text().split())
    assert loaded <= MOST_FILES_LOADED, f"{loaded} files are loaded"
    assert (functions <= MOST_FUNCTIONS_PASSED) and (files <= MOST_FILES_PASSED), f"{functions}, {files}"
    assert functions > 300, "it counts"


# What only some runs need: a function imports it where a run chooses it.
CHOSEN = (
    *(
        "data.keyed_random",
        "data.samples.bert",
        "data.samples.blend",
        "data.text.hub",
        "modeling.bert",
        "modeling.gpt2",
    ),
    *(
        "modeling.unpadding",
        "modeling.lazy_weights",
        "modeling.formats",
        "recipes.tasks",
        "launch.checkpoints.branching",
        "launch.checkpoints.proof",
        "launch.checkpoints.reading",
        "launch.weights",
    ),
    *(f"launch.deepspeed_fixes.{fix}" for fix in ("lamb", "zero0", "loss_scale", "train_batch_timer")),
    *(f"launch.deepspeed_fixes.{fix}" for fix in ("flat_weights", "freed_gradients")),
    *("launch.deepspeed_fixes.cpu_adam_bias_correction", "launch.records.shared_directory"),
    *(f"launch.training.{file}" for file in ("compiling", "model_trial", "padded_batches", "profiling")),
    "launch.training.transformers_trainer",
    # several ranks; a save or a resume; the end
    *(f"launch.ranks.{file}" for file in ("connection", "door", "launch_environment", "ranks_meeting")),
    *(
        f"launch.checkpoints.{file}"
        for file in ("geometry", "manifest", "shares", "stored", "sums", "tensor_file")
    ),
    *(f"launch.records.{file}" for file in ("deviations", "result", "result_text")),
)


def test_what_only_some_runs_need_is_imported_where_it_is_chosen():
    reached = {"launch.pretrain", *GRAPH["launch.training.start"], "data.corpus", "launch.training.loop"}
    reached -= set(CHOSEN)  # by a function of the start
    queue = list(reached)
    while queue:
        module = queue.pop()
        body = ast.parse(MODULES[module].read_text()).body
        at_once = ast.Module([node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))], [])
        new = {name for name in imported(at_once) if name in MODULES} - reached
        queue += new
        reached |= new
    assert len(reached) > 100
    assert not sorted(module for module in reached if module.startswith(CHOSEN))
    assert "launch.deepspeed_fixes.muon" not in reached


def test_planning_loads_neither_torch_nor_deepspeed():
    """Also not by way of another module, nor when a recipe is resolved against a ds_config."""
    modules = [module for module in MODULES if module.startswith(WITHOUT_TORCH)]
    assert len(modules) > 30
    program = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
from ds_configs.plan import HOST, Machine
from ds_configs.resolver import resolve
from recipes import catalog
machine = Machine(HOST, fp16=False, bf16=True, compiler=True, libaio=False)
resolve(catalog.load(catalog.DEFAULT_RECIPE), "zero1", 2, machine)
heavy = {{"torch", "deepspeed", "transformers", "datasets", "numpy"}} & set(sys.modules)
sys.exit(f"loaded {{sorted(heavy)}}" if heavy else 0)
"""
    done = run([sys.executable, "-c", program], timeout=60)
    assert done.returncode == 0, done.stdout


def test_a_plan_of_pretrain_loads_no_torch():
    """Where cores train; a configuration of the user's is judged by DeepSpeed, which takes torch along."""
    program = """
import sys
from launch import pretrain
sys.argv = ["pretrain.py", "--plan", "--recipe", "parallel_kinds/3d"]
pretrain.main()
heavy = {"torch", "deepspeed", "transformers", "numpy"} & set(sys.modules)
sys.exit(f"loaded {sorted(heavy)}" if heavy else 0)
"""
    done = run([sys.executable, "-c", program], env={"DS_ACCELERATOR": "cpu"}, timeout=60)
    assert done.returncode == 0 and "tp 2 x pp 2 x dp 2" in done.stdout, done.stdout


def test_launch_shows_commands_only():
    """Every file at the top is a program, and none bears the name of a package, which it would shadow."""
    assert len(COMMANDS) >= 9
    assert all('if __name__ == "__main__"' in file.read_text() for file in COMMANDS)
    assert not {file.stem for file in COMMANDS} & {*PACKAGES, *sys.stdlib_module_names}


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A directory with other packages of our names, which cannot be imported."""
    directory = tmp_path_factory.mktemp("foreign")
    for package in PACKAGES:
        (directory / package).mkdir()
        (directory / package / "__init__.py").write_text(f"raise ImportError('another {package}')")
    return directory


@pytest.mark.parametrize("file", [*COMMANDS, *TOOLS], ids=lambda file: file.name)
def test_commands_explain_themselves_from_any_directory(file, foreign):
    """--help works where the directory and the environment have other packages of our names; in 80 columns."""
    env = {"PYTHONPATH": str(foreign), "COLUMNS": "80"}
    done = run([sys.executable, "-u", str(file), "--help"], env=env, cwd=foreign, timeout=60)
    assert done.returncode == 0 and "examples:" in done.stdout, done.stdout
    assert not [line for line in done.stdout.splitlines() if len(line) > 80]


@pytest.mark.ci
def test_the_launchers_train_the_clone_s_packages(foreign, tmp_path):
    """Where others lie, and no package of ours is installed; as a module in the clone itself."""
    env = {"PYTHONPATH": str(foreign)}
    flags = ["--tiny", "--plan", "--ds_config", "zero1", "--out", str(tmp_path / "run")]
    file = str(ROOT / "launch/pretrain.py")
    layouts = [str(ROOT / "launch/compare_layouts.py"), "--tiny", "--steps", "1", "--only", "dp2 zero1"]
    for cwd, command in (
        (foreign, [*deepspeed(2), file, *flags]),
        (foreign, [*torchrun(2), file, *flags]),
        (ROOT, [sys.executable, "-m", "launch.pretrain", *flags]),
        (foreign, [sys.executable, "-u", *layouts, "--out", str(tmp_path / "layouts")]),
    ):
        done = run(command, env=env, cwd=cwd)
        assert done.returncode == 0 and "dp" in done.stdout, done.stdout


def test_one_file_changes_the_path():
    """Besides those that run a script as Python does that starts it."""
    changes = re.compile(r"sys\.path(\.\w+\(|\[.*\] *=)")
    files = [*FILES, *(ROOT / "tests").rglob("*.py")]
    found = {file.resolve() for file in files if changes.search(file.read_text())}
    starts = {ROOT / "tests/rank_server.py", ROOT / "tests/workers/srun_task.py"}
    starts.add(ROOT / "launch/experiments/proving/proof.py")  # of an adapter
    assert found - starts == {ROOT / "launch/_clone_first.py"}


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_no_module_shadows_the_standard_library(package):
    """A module next to a command stands on its path, and readers stumble everywhere."""
    names = {file.stem for file in Path(ROOT / package).glob("*.py")} - {"__init__"}
    assert not names & sys.stdlib_module_names
