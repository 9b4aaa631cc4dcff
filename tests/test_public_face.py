"""What `import octavo` shows, as in httpx's test of its exported members: all public names, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

import octavo


@pytest.mark.parametrize("name", octavo.__all__)
def test_every_public_name_resolves(name: str):
    value = getattr(octavo, name)
    assert not isinstance(value, types.ModuleType)
    assert value is getattr(octavo, name)
    home = getattr(value, "__module__", "octavo")
    assert home == "octavo" or home.startswith("octavo.")


def test_names_are_listed_once():
    assert len(set(octavo.__all__)) == len(octavo.__all__)


def test_dir_shows_all_public_names_and_no_others():
    """Submodules become attributes when they are imported; they are not part of the face."""
    for name in octavo.__all__:
        getattr(octavo, name)
    shown = {
        name
        for name in dir(octavo)
        if not name.startswith("_") and not isinstance(getattr(octavo, name), types.ModuleType)
    }
    assert shown == set(octavo.__all__)


def test_a_star_import_brings_exactly_the_public_names():
    scope: dict[str, object] = {}
    exec("from octavo import *", scope)
    assert scope.keys() - {"__builtins__"} == set(octavo.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = octavo.no_such_name
    assert not hasattr(octavo, "_no_such_name")


def test_the_version_is_the_package_s():
    from importlib.metadata import version

    assert octavo.__version__ == version("octavo")


def test_importing_octavo_loads_no_heavy_library():
    script = (
        "import sys, octavo\n"
        "octavo.SamplingParams()\n"
        "heavy = ('torch', 'transformers', 'numpy', 'tokenizers', 'fastapi', 'pydantic', 'zmq', 'msgspec')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
