"""The order of the house, and which modules are light.

Imports go up the list of rooms in docs/design.md; no module takes part in a
circle; a package has at most five floors; modules of commands and launching
import no TensorFlow.
"""

import ast
import functools
import pathlib
import re

import pytest

import mgpu_tf

ROOT = pathlib.Path(mgpu_tf.__file__).parent
DESIGN = ROOT.parent / "docs" / "design.md"
MOST_ROOMS = 30
# Of a package within the house.
MOST_FLOORS = 5

HEAVY = {"tensorflow", "keras", "numpy", "tensorflow_datasets", "sklearn"}

# The modules that know private names, of Keras and of strategies.
INTERNALS = {
    "mgpu_tf.engine.keras_internals",
    "mgpu_tf.strategies.replicas.tensorflow_internals",
}


def module_name(path):
    name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
    return name if path.parent == ROOT else name.removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


@functools.cache
def parsed(module):
    """Not for each process that collects tests."""
    return ast.parse(MODULES[module].read_text(), str(MODULES[module]))


def room(module):
    """The first part below the package."""
    return module.split(".")[1]


def order():
    """The rooms as docs/design.md lists them, the lowest first."""
    block = re.search(r"```rooms\n(.*?)```", DESIGN.read_text(), re.DOTALL)
    return [line.split()[0] for line in block[1].splitlines()]


ROOMS = order()

# Rooms of which no module imports TensorFlow, Keras or NumPy.
LIGHT_ROOMS = {
    "__init__",
    "__main__",
    "_version",
    "cli",
    "cluster",
    "commands",
    "config",
    "errors",
    "fields",
    "flags",
    "folders",
    "launch",
    "mesh",
    "names",
    "options",
    "planner",
    "user_function",
}
# The light modules of other rooms.
LIGHT_MODULES = {
    "mgpu_tf.checkpoints",
    "mgpu_tf.checkpoints.storage.disk",
    "mgpu_tf.checkpoints.storage.interface",
    "mgpu_tf.checkpoints.interval",
    "mgpu_tf.checkpoints.keeping",
    "mgpu_tf.checkpoints.manifest",
    "mgpu_tf.checkpoints.storage.objects",
    "mgpu_tf.checkpoints.parts",
    "mgpu_tf.checkpoints.reading",
    "mgpu_tf.checkpoints.recovery",
    "mgpu_tf.checkpoints.registry",
    "mgpu_tf.checkpoints.step_losses",
    "mgpu_tf.checkpoints.storage",
    "mgpu_tf.checkpoints.store",
    "mgpu_tf.reports",
    "mgpu_tf.reports.figures",
    "mgpu_tf.reports.goodput",
    "mgpu_tf.reports.charts",
    "mgpu_tf.reports.device_times",
    "mgpu_tf.reports.distribution",
    "mgpu_tf.reports.memory",
    "mgpu_tf.reports.page",
    "mgpu_tf.reports.pipeline_trace",
    "mgpu_tf.reports.placement",
    "mgpu_tf.reports.profile_file",
    "mgpu_tf.reports.report",
    "mgpu_tf.reports.scaling",
    "mgpu_tf.reports.step_times",
    "mgpu_tf.reports.stragglers",
    "mgpu_tf.reports.terminal",
    "mgpu_tf.reports.time_line",
    "mgpu_tf.reports.trace_html",
    "mgpu_tf.reports.tracks",
    "mgpu_tf.reports.wall_time",
    "mgpu_tf.runtime",
    "mgpu_tf.runtime.quiet_import",
    "mgpu_tf.runtime.versions",
    "mgpu_tf.studies",
    "mgpu_tf.studies.doctor",
    "mgpu_tf.studies.doctor.findings",
    "mgpu_tf.studies.doctor.gpus",
    "mgpu_tf.studies.doctor.machine",
    "mgpu_tf.studies.doctor.network",
    "mgpu_tf.studies.doctor.tensorflow_sees",
    "mgpu_tf.studies.setup_check",
}
LIGHT = sorted(
    m for m in MODULES if room(m) in LIGHT_ROOMS or m in LIGHT_MODULES
)


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


IMPORTED = {
    module: own(imports(everywhere(parsed(module)))) for module in MODULES
}


def test_the_list_names_every_room_once():
    assert sorted(ROOMS) == sorted({room(module) for module in MODULES})
    assert len(ROOMS) <= MOST_ROOMS
    assert set(MODULES) >= LIGHT_MODULES


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_up_the_list(module):
    here = room(module)
    for imported in own(imports(everywhere(parsed(module)))):
        assert imported in MODULES
        there = room(imported)
        assert here == there or ROOMS.index(there) < ROOMS.index(here), imported


def circle(graph):
    """Modules of which each imports the next; empty where there is none."""
    done, path = set(), []

    def visit(module):
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        path.append(module)
        for imported in sorted(graph[module]):
            found = visit(imported)
            if found:
                return found
        done.add(path.pop())
        return []

    return next((found for found in map(visit, graph) if found), [])


def test_no_circle():
    graph = {module: others - {module} for module, others in IMPORTED.items()}
    assert circle(graph) == []


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


PACKAGES = {
    module
    for module in MODULES
    if MODULES[module].name == "__init__.py" and module != "mgpu_tf.__init__"
}


def child(package, module):
    """The part of the package that the module is or is in; None if outside."""
    if module == package:
        return "__init__"
    inside = module.startswith(package + ".")
    return module[len(package) + 1 :].split(".")[0] if inside else None


def parts(package, imported):
    """Which parts of the package each of its parts imports."""
    graph = {}
    for module, others in imported.items():
        if here := child(package, module):
            there = {child(package, other) for other in others}
            graph.setdefault(here, set()).update(there - {here, None})
    return graph


def floors(graph):
    """On how many floors the parts are; what is imported is one lower."""

    @functools.cache
    def floor(part):
        return 1 + max(map(floor, graph[part]), default=0)

    return max(map(floor, graph))


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_a_package_has_few_floors(package):
    graph = parts(package, IMPORTED)
    assert circle(graph) == []
    assert floors(graph) <= MOST_FLOORS


def test_floors_are_counted():
    imported = {
        "mgpu_tf.a.b": {"mgpu_tf.a.c.d"},
        "mgpu_tf.a.c.d": {"mgpu_tf.a.e", "mgpu_tf.errors"},
        "mgpu_tf.a.c.f": {"mgpu_tf.a.c.d"},
        "mgpu_tf.a.e": set(),
        "mgpu_tf.errors": set(),
    }
    graph = parts("mgpu_tf.a", imported)
    assert graph == {"b": {"c"}, "c": {"e"}, "e": set()}
    assert floors(graph) == 3
    imported["mgpu_tf.a.e"] = {"mgpu_tf.a.c.f"}
    assert circle(parts("mgpu_tf.a", imported)) == ["c", "e"]


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_import_no_heavy_ones(module):
    imported = set(imports(on_import(parsed(module))))
    assert not {name.split(".")[0] for name in imported} & HEAVY
    assert own(imported) <= set(LIGHT)


@pytest.mark.parametrize("module", sorted(set(MODULES) - INTERNALS))
def test_private_names_have_modules_of_their_own(module):
    tree = parsed(module)
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
        (
            "from mgpu_tf.cluster.config import ClusterConfig",
            "mgpu_tf.cluster.config",
        ),
        ("from mgpu_tf.launch import local", "mgpu_tf.launch.local"),
        ("def f():\n  import mgpu_tf.cluster.ports", "mgpu_tf.cluster.ports"),
    ],
)
def test_the_names_of_imports(code, imported):
    assert set(imports(everywhere(ast.parse(code)))) == {imported}
