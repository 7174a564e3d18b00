"""The order of the house: imports only go down.

5   flags, cli, scaling_command, plan_command, __init__, __main__
4   job, benchmark
3   trainer, own_loop, loop, session, run_state, saver, arguments, pace,
    parity, likeness
2   engine.*
1   parameter_server, layers, devices, mirrored, strategy, data.*, peers,
    models, optimizers, callbacks, datasets.*, determinism, profiling,
    callback_state, messages, calls
0   _version, errors, cluster, config, report, quiet, display, target, missing,
    checkpoints, recovery, save_options, folders,
    scaling, planner, goodput, plots, launch.*
"""

import ast
import pathlib

import pytest

import mgpu_tf

ROOT = pathlib.Path(mgpu_tf.__file__).parent

FLOORS = {
    "_version": 0,
    "errors": 0,
    "cluster": 0,
    "config": 0,
    "report": 0,
    "quiet": 0,
    "display": 0,
    "target": 0,
    "missing": 0,
    "scaling": 0,
    "goodput": 0,
    "plots": 0,
    "launch": 0,
    "checkpoints": 0,
    "recovery": 0,
    "save_options": 0,
    "folders": 0,
    "planner": 0,
    "parameter_server": 1,
    "layers": 1,
    "devices": 1,
    "mirrored": 1,
    "strategy": 1,
    "profiling": 1,
    "models": 1,
    "optimizers": 1,
    "datasets": 1,
    "data": 1,
    "determinism": 1,
    "callback_state": 1,
    "peers": 1,
    "messages": 1,
    "calls": 1,
    "likeness": 3,
    "callbacks": 1,
    "engine": 2,
    "trainer": 3,
    "loop": 3,
    "own_loop": 3,
    "session": 3,
    "follower": 3,
    "arguments": 3,
    "explain": 3,
    "normalization": 3,
    "pace": 3,
    "run_state": 3,
    "saver": 3,
    "parity": 3,
    "job": 4,
    "benchmark": 4,
    "flags": 5,
    "cli": 5,
    "scaling_command": 5,
    "plan_command": 5,
    "__init__": 5,
    "__main__": 5,
}

# Imports on one floor; within a folder the modules may import each other.
SAME_FLOOR = {
    ("cluster", "errors"),
    ("config", "errors"),
    ("config", "save_options"),
    ("save_options", "errors"),
    ("folders", "errors"),
    ("launch", "folders"),
    ("display", "report"),
    ("display", "goodput"),
    ("launch", "cluster"),
    ("launch", "errors"),
    ("target", "errors"),
    ("missing", "cluster"),
    ("missing", "launch"),
    ("data", "strategy"),
    ("strategy", "devices"),
    ("strategy", "mirrored"),
    ("strategy", "parameter_server"),
    ("layers", "parameter_server"),
    ("peers", "data"),
    ("peers", "messages"),
    ("peers", "calls"),
    ("parity", "trainer"),
    ("trainer", "arguments"),
    ("trainer", "explain"),
    ("trainer", "follower"),
    ("trainer", "loop"),
    ("trainer", "session"),
    ("own_loop", "explain"),
    ("own_loop", "run_state"),
    ("own_loop", "saver"),
    ("own_loop", "session"),
    ("loop", "arguments"),
    ("loop", "pace"),
    ("loop", "run_state"),
    ("loop", "saver"),
    ("loop", "session"),
    ("session", "arguments"),
    ("session", "likeness"),
    ("session", "pace"),
    ("follower", "saver"),
    ("trainer", "run_state"),
    ("trainer", "saver"),
    ("__init__", "flags"),
    ("__main__", "cli"),
    ("cli", "flags"),
    ("cli", "scaling_command"),
    ("cli", "plan_command"),
    ("recovery", "report"),
    ("planner", "config"),
    ("planner", "errors"),
    ("planner", "scaling"),
    ("plots", "errors"),
    ("plots", "scaling"),
}

HEAVY = {"tensorflow", "keras", "numpy", "tensorflow_datasets", "sklearn"}

# The one module that knows Keras's private names.
INTERNALS = "mgpu_tf.engine.keras_internals"


def module_name(path):
    name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
    return name if path.parent == ROOT else name.removesuffix(".__init__")


MODULES = {
    module_name(path): ast.parse(path.read_text(), str(path))
    for path in sorted(ROOT.rglob("*.py"))
}


def unit(module):
    """What has a floor: the first part below the package."""
    return module.split(".")[1]


LIGHT = sorted(m for m in MODULES if FLOORS.get(unit(m)) in (0, 5))


def everywhere(tree):
    return ast.walk(tree)


def on_import(tree):
    """The nodes that run when the module is imported."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            nodes.extend(node.orelse)
        elif not isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        ):
            nodes.extend(ast.iter_child_nodes(node))


def imports(nodes):
    """The modules that the nodes import, by their full names."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (own_name(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else own_name(node.module)


def own_name(module):
    return "mgpu_tf.__init__" if module == "mgpu_tf" else module


def own(modules):
    return {m for m in modules if m.split(".")[0] == "mgpu_tf"}


def test_every_module_has_a_floor():
    assert {unit(module) for module in MODULES} <= set(FLOORS)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    here = unit(module)
    for imported in own(imports(everywhere(MODULES[module]))):
        assert imported in MODULES
        there = unit(imported)
        lower = FLOORS[there] < FLOORS[here]
        assert lower or here == there or (here, there) in SAME_FLOOR, imported


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_import_no_heavy_ones(module):
    imported = set(imports(on_import(MODULES[module])))
    assert not {name.split(".")[0] for name in imported} & HEAVY
    assert own(imported) <= set(LIGHT)


@pytest.mark.parametrize("module", sorted(set(MODULES) - {INTERNALS}))
def test_private_names_of_keras_are_in_one_place(module):
    tree = MODULES[module]
    assert not any(
        name.startswith("keras.src") for name in imports(everywhere(tree))
    )
    for node in everywhere(tree):
        if isinstance(node, ast.Attribute):
            assert ast.unparse(node) != "keras.src"
            private = node.attr.startswith("_") and node.attr[1:2] != "_"
            owner = ast.unparse(node.value)
            assert not private or owner in ("self", "cls", "super()", "os"), (
                ast.unparse(node)
            )


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import keras", True),
        ("import tensorflow.keras as tk", True),
        ("from keras import layers", True),
        ("try:\n  import keras\nexcept ImportError: pass", True),
        ("class A:\n  import keras", True),
        ("if TYPE_CHECKING:\n  pass\nelse:\n  import keras", True),
        ("def f():\n  import keras", False),
        ("if TYPE_CHECKING:\n  import keras", False),
        ("if typing.TYPE_CHECKING:\n  import keras", False),
        ("import keras_tuner", False),
    ],
)
def test_the_check_itself(code, heavy):
    found = {n.split(".")[0] for n in imports(on_import(ast.parse(code)))}
    assert bool(found & HEAVY) is heavy


@pytest.mark.parametrize(
    ("code", "imported"),
    [
        ("import mgpu_tf", "mgpu_tf.__init__"),
        ("from mgpu_tf import Trainer", "mgpu_tf.__init__"),
        ("from mgpu_tf import flags as f", "mgpu_tf.flags"),
        ("from mgpu_tf.cluster import ClusterConfig", "mgpu_tf.cluster"),
        ("from mgpu_tf.launch import local", "mgpu_tf.launch.local"),
        ("def f():\n  import mgpu_tf.launch.ports", "mgpu_tf.launch.ports"),
    ],
)
def test_the_names_of_imports(code, imported):
    assert set(imports(everywhere(ast.parse(code)))) == {imported}
