"""Each package says what it offers: a sorted `__all__` whose every name exists and has a docstring."""

from __future__ import annotations

import importlib
import pkgutil
import types

import pytest

import kvd
import kvd_client

PACKAGES = sorted(
    info.name
    for root in (kvd, kvd_client)
    for info in pkgutil.walk_packages(root.__path__, f"{root.__name__}.", onerror=lambda name: None)
    if info.ispkg
)


def sort_key(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, each alphabetical: the order that `ruff` writes."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2
    return kind, name


@pytest.mark.parametrize("name", ["kvd_client", *PACKAGES])
def test_a_package_exports_a_sorted_all(name: str) -> None:
    """`__all__` exists, is not empty, is sorted, has no name twice, and each name is there."""
    package = importlib.import_module(name)
    exported = list(getattr(package, "__all__", []))
    assert exported, f"{name} has no __all__"
    assert exported == sorted(set(exported), key=sort_key)
    missing = [each for each in exported if not hasattr(package, each)]
    assert missing == []


@pytest.mark.parametrize("name", ["kvd_client", *PACKAGES])
def test_a_package_explains_itself(name: str) -> None:
    """The package has a docstring of its own that names each of its modules."""
    package = importlib.import_module(name)
    text = package.__doc__ or ""
    assert len(text) > 80, f"{name} needs a docstring that says what its modules do"
    modules = [info.name for info in pkgutil.iter_modules(package.__path__) if info.name != "__main__"]
    unnamed = [module for module in modules if f"`{module}`" not in text and f"{module}.py" not in text]
    assert unnamed == [], f"{name}'s docstring does not say what these do"


@pytest.mark.parametrize("name", ["kvd_client", *PACKAGES])
def test_what_is_exported_is_documented(name: str) -> None:
    """Exported classes and functions have docstrings."""
    package = importlib.import_module(name)
    documented = (type, types.FunctionType)
    bare = [
        each
        for each in getattr(package, "__all__", [])
        if isinstance(getattr(package, each, None), documented) and not getattr(package, each).__doc__
    ]
    assert bare == []
