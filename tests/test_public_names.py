"""The public names: one list, loaded when first used."""

import ast
import importlib
import inspect
import types

import pytest

import mgpu_tf

LAZY = sorted(set(mgpu_tf.__all__) - {"__version__"})


def test_sorted_and_listed():
    assert mgpu_tf.__all__ == sorted(set(mgpu_tf.__all__))
    assert dir(mgpu_tf) == mgpu_tf.__all__


def test_every_lazy_name_has_a_home():
    assert {*mgpu_tf._HOMES, *mgpu_tf._MODULES} == set(LAZY)


@pytest.mark.parametrize("name", LAZY)
def test_resolves(name, monkeypatch):
    monkeypatch.delattr(mgpu_tf, name, raising=False)
    value = getattr(mgpu_tf, name)
    if name in mgpu_tf._MODULES:
        assert value is importlib.import_module(f"mgpu_tf.{name}")
    else:
        home = importlib.import_module(mgpu_tf._HOMES[name])
        assert value is vars(home)[name]
        assert value.__module__ == home.__name__
        assert not isinstance(value, types.ModuleType)
    assert inspect.getdoc(value)


def test_type_checkers_see_the_same():
    tree = ast.parse(inspect.getsource(mgpu_tf))
    (block,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If)
        and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    seen = {
        alias.asname or alias.name: statement.module
        for statement in block.body
        for alias in statement.names
    }
    modules = dict.fromkeys(mgpu_tf._MODULES, "mgpu_tf")
    assert seen == mgpu_tf._HOMES | modules


@pytest.mark.parametrize("name", ["Trainr", "_private", "cluster_config"])
def test_unknown(name):
    with pytest.raises(AttributeError, match=f"'mgpu_tf' has no .*'{name}'"):
        getattr(mgpu_tf, name)


def test_version():
    assert mgpu_tf.__version__ == mgpu_tf._version.__version__
