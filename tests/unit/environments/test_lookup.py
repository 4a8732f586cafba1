import subprocess
import sys
from pathlib import Path

import pytest

import rltrain
from rltrain.environments.lookup import Lookup

TABLE = "7150932846"


def environment(table=TABLE):
    made = Lookup()
    made.reset(table)
    return made


def test_a_call_shows_the_entry_of_its_key():
    assert [environment().lookup(key) for key in range(10)] == list(TABLE)
    assert environment().lookup(key=3) == "0"


def test_following_pointers_by_hand():
    hidden = environment()
    assert hidden.lookup(0) == "7"
    assert hidden.lookup(7) == "8"
    assert hidden.lookup(8) == "4"


@pytest.mark.parametrize("key", [-1, 10, 3.0, "3", True, None, "9" * 500])
def test_a_key_that_does_not_exist_is_refused_in_a_short_line(key):
    with pytest.raises(ValueError, match=r"^key=.*: must be an integer from 0 to 9$") as error:
        environment().lookup(key)
    assert len(str(error.value)) < 80


@pytest.mark.parametrize("table", ["", "123", "715093284x", "71509328461", "٠١٢٣٤٥٦٧٨٩"])
def test_a_table_that_is_not_ten_digits_is_refused(table):
    with pytest.raises(ValueError, match="10 decimal digits"):
        environment(table)


def test_the_only_tool_is_lookup():
    public = {name for name in dir(Lookup) if not name.startswith("_")}
    assert public == {"reset", "lookup"}


@pytest.mark.parametrize("module", ["lookup", "higher_lower"])
def test_an_environment_needs_the_standard_library_alone(module):
    script = f"import sys, rltrain.environments.{module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    root = Path(rltrain.__file__).parents[1]
    command = [sys.executable, "-S", "-c", script]  # With -S, Python cannot find installed packages.
    loaded = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    others = set(loaded.split()) - sys.stdlib_module_names - {"rltrain", "__main__"}
    assert not others
