# SPDX-License-Identifier: Apache-2.0
"""What users and their tools see of the package: types, stubs and docstrings of everything in fusedmoe.__all__."""

import ast
import inspect
import re
import types
from pathlib import Path

import pytest
import torch

import fusedmoe
from common import V5
from fusedmoe import _core

if not V5:
    pytest.skip("one version is enough", allow_module_level=True)

FOLDER = Path(fusedmoe.__file__).parent
PUBLIC = {name: getattr(fusedmoe, name) for name in fusedmoe.__all__}
FUNCTIONS = {name: value for name, value in PUBLIC.items() if isinstance(value, types.FunctionType)}


def stub():
    """The functions and values of _core.pyi."""
    tree = ast.parse((FOLDER / "_core.pyi").read_text())
    functions = {node.name: node.args for node in tree.body if isinstance(node, ast.FunctionDef)}
    return functions, {node.target.id for node in tree.body if isinstance(node, ast.AnnAssign)}


def test_the_package_says_that_it_is_typed():
    assert (FOLDER / "py.typed").is_file() and (FOLDER / "_core.pyi").is_file()


def test_the_stub_names_what_the_extension_has():
    functions, values = stub()
    found = {name: getattr(_core, name) for name in dir(_core) if not name.startswith("__")}
    assert set(functions) == {name for name, value in found.items() if callable(value)}
    assert values == {name for name, value in found.items() if not callable(value)}


@pytest.mark.parametrize("name", sorted(stub()[0]))
def test_the_stub_takes_as_many_arguments(name):
    """One more than the stub has is a TypeError. What the extension says of its arguments has the stub's names."""
    args = stub()[0][name]
    assert not args.args and not args.kwonlyargs  # positions only, as in C
    if args.vararg is None and name != "run":
        with pytest.raises(TypeError):
            getattr(_core, name)(*[None] * (len(args.posonlyargs) + 1))
    said = re.match(rf"{name}\(([^)]*)\)", getattr(_core, name).__doc__)
    if said:
        names = [word.split("=")[0].strip(" *") for word in said[1].split(",")]
        mine = [a.arg.rstrip("_") for a in args.posonlyargs] + ([args.vararg.arg] if args.vararg else [])
        assert names == mine


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_everything_public_is_described(name):
    assert len(inspect.getdoc(PUBLIC[name]) or "") > 20


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_types_and_shapes(name):
    """Every argument has a type, and the docstring of a function gives the shape of each tensor that it takes."""
    signature, text = inspect.signature(FUNCTIONS[name]), inspect.getdoc(FUNCTIONS[name])
    assert signature.return_annotation is not inspect.Signature.empty
    for argument in signature.parameters.values():
        assert argument.annotation is not inspect.Parameter.empty
        if "Tensor" in str(argument.annotation):
            shape = rf"\b{argument.name}:? \[|\b{argument.name}\b[^.:]*: as in ``"
            assert re.search(shape, text), f"{argument.name} has no shape"


def test_a_missing_shape_is_found(monkeypatch):
    def route(logits: torch.Tensor) -> torch.Tensor:
        """The experts of each token. Logits may have any strides."""
        return logits

    monkeypatch.setitem(FUNCTIONS, "route", route)
    with pytest.raises(AssertionError, match="logits has no shape"):
        test_types_and_shapes("route")
