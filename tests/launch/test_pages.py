"""Every command in the pages of platforms is run by a test."""

import ast
import pathlib

import pytest

from tests import clusters, pages

# A page, and the test that runs all of its blocks of a language.
RUN_BY = {
    ("clusters.md", "sh"): "launch/test_clusters_page.py::test_commands",
    ("kubernetes.md", "sh"): "launch/test_kubernetes_page.py::test_commands",
    ("machines.md", "sh"): "launch/test_ssh.py::test_the_commands_of_the_page",
    ("ray.md", "python"): "launch/test_ray.py::test_the_commands_of_the_page",
    ("ray.md", "sh"): "launch/test_ray.py::test_the_commands_of_the_page",
    ("slurm.md", "sh"): "cluster/test_slurm.py::test_the_commands_of_the_page",
}


@pytest.mark.parametrize("page", sorted({page for page, _ in RUN_BY}))
def test_every_block_has_a_test(page):
    found = {(page, language) for language in pages.languages(page)}
    assert found == {key for key in RUN_BY if key[0] == page}


@pytest.mark.parametrize("key", RUN_BY, ids=" ".join)
def test_the_test_takes_all_blocks(key):
    """It reads them by `pages.blocks`, so a new one is run as well."""
    file, name = RUN_BY[key].split("::")
    tree = ast.parse((pathlib.Path(clusters.ROOT, "tests") / file).read_text())
    [test] = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    calls = [
        tuple(ast.literal_eval(argument) for argument in node.args)
        for node in ast.walk(test)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "pages.blocks"
    ]
    assert key in calls
