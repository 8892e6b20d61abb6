"""Exceptions of kvd and errors of the wire are one table."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from enum import IntEnum

import msgpack
from hypothesis import given, settings
from hypothesis import strategies as st

import kvd
from kvd.errors import Busy, EnvironmentFault, InternalError, KvdError
from kvd.front import to_error_object
from kvd.front.wire_errors import FAMILIES, plain, wire_name
from kvd_client.errors import ERROR_CLASSES, RemoteError, remote_error
from kvd_client.wire import CODES, ErrorObject


def all_errors(root: type[KvdError] = KvdError) -> Iterator[type[KvdError]]:
    """Every error class of the modules that hold them."""
    yield root
    for sub in root.__subclasses__():
        yield from all_errors(sub)


def test_every_error_of_kvd_has_a_code() -> None:
    """Each error class of each package has a name of the wire's table, or one line that says which it belongs to."""
    for module in pkgutil.walk_packages(kvd.__path__, "kvd."):
        if module.name.rpartition(".")[2] == "errors":
            importlib.import_module(module.name)
    ours = {error for error in all_errors() if error.__module__.startswith("kvd.")}
    assert len(ours) > 15
    nameless = {
        f"{error.__module__}.{error.__name__}: {error.name}"
        for error in ours
        if error.name not in CODES and error.name not in FAMILIES and not issubclass(error, InternalError)
    }
    assert nameless == set()
    assert set(FAMILIES.values()) <= set(CODES)
    assert not set(FAMILIES) & set(CODES)
    bugs = {error for error in ours if issubclass(error, InternalError)}
    assert {wire_name(error) for error in bugs} == {"internal"}


def test_every_code_has_a_client_class() -> None:
    """Each name of the table is one exception class of the client, and the other way round."""
    assert set(ERROR_CLASSES) == set(CODES)
    assert len(set(ERROR_CLASSES.values())) == len(CODES)
    for name in CODES:
        error = remote_error(ErrorObject.of(name, "why", data={"n": 1}, retry_after_s=2.0))
        assert type(error) is ERROR_CLASSES[name]
        assert (error.name, error.code, error.data, error.retry_after_s) == (name, CODES[name], {"n": 1}, 2.0)
        assert str(error) == "why"
    assert type(remote_error(ErrorObject(999, "new_one", "?"))) is RemoteError


def test_fields_survive() -> None:
    """Message, data and retry time of an exception are those of the wire error."""
    error = to_error_object(Busy("full", retry_after_s=3.0, queued=4))
    assert error == ErrorObject(CODES["busy"], "busy", "full", {"queued": 4}, 3.0)


def test_a_fine_name_travels_with_its_family() -> None:
    """A package's own name is shown as its family's, the name itself in `data`; an unknown one as its base's."""

    class Disk(EnvironmentFault):
        """A fault of the store."""

        name = "disk"

    class Odd(Busy):
        """A name nobody knows."""

        name = "odd"

    error = to_error_object(Disk("full", free_bytes=3))
    assert (error.name, error.data) == ("storage_error", {"free_bytes": 3, "fault": "disk"})
    assert to_error_object(Odd("x")).name == "busy"


@given(
    st.recursive(
        st.none() | st.integers() | st.floats() | st.text() | st.binary() | st.builds(object) | st.just("\ud800"),
        lambda inner: st.lists(inner) | st.dictionaries(st.integers() | st.text(), inner) | st.sets(st.integers()),
        max_leaves=10,
    )
)
@settings(deadline=None)
def test_any_data_can_be_sent(value: object) -> None:
    """Whatever an exception carries as data, its error can be packed."""
    assert msgpack.packb(plain(value)) is not None
    assert msgpack.packb(to_error_object(KvdError("m\ud800", value=value)).to_wire())


def test_integers_and_nesting_are_bounded() -> None:
    """Integer subclasses become plain, deep nesting becomes text."""

    class Size(IntEnum):
        """An integer with a name."""

        BIG = 7

    deep: object = 1
    for _ in range(50):
        deep = [deep]
    assert plain(Size.BIG) == 7
    assert plain(2**70) == str(2**70)
    assert msgpack.packb(plain(deep))


def test_the_front_loads_no_model_code() -> None:
    """Importing the server loads neither mlx nor numpy: its thread must never touch an array."""
    code = (
        "import sys, kvd.front; "
        "print([name for name in sys.modules if name.split('.')[0] in ('mlx', 'mlx_lm', 'numpy')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
