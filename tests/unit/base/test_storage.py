"""Tests of the storage paths in the config."""

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from rltrain.base.errors import ConfigError
from rltrain.base.storage import local_path

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
LATIN_1 = b"caf\xe9".decode("utf-8", "surrogateescape")


def refusal(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        local_path(path, "key")
    assert str(caught.value).startswith("key: ")
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix("key: ")


def test_a_path_need_not_exist_and_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_path("~/new/x", "key") == tmp_path / "new" / "x"
    assert local_path("büro/数据", "key") == Path("büro/数据")
    (tmp_path / "afile").touch()
    assert local_path(f"{tmp_path}/afile/x", "key") == tmp_path / "afile" / "x"


def test_what_the_system_takes_for_no_path_is_refused_with_its_reason(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    assert refusal("x" * 300) == "the path cannot be accessed (File name too long); give another path"
    assert refusal("x/" * 3000) == "the path cannot be accessed (File name too long); give another path"
    assert "(Too many levels of symbolic links)" in refusal(f"{tmp_path}/loop/x")
    assert "(embedded null byte)" in refusal("x\0y")


def test_a_tilde_without_a_home_folder_is_refused(monkeypatch):
    def unknown(_):
        raise KeyError

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert (
        refusal("~/x") == "'~' cannot be expanded, because HOME is not set or the user is unknown; write the full path"
    )
    assert "write the full path" in refusal("~nobody-of-that-name/x")


def test_a_name_that_is_not_utf8_is_refused_also_if_it_is_that_of_the_working_directory(tmp_path, monkeypatch):
    assert refusal(f"/x/{LATIN_1}") == r"a name in '/x/caf\udce9' is not UTF-8; rename that file or folder"
    os.mkdir(os.fsencode(tmp_path / LATIN_1))
    monkeypatch.chdir(tmp_path / LATIN_1)
    assert refusal("x").endswith(r"caf\udce9/x' is not UTF-8; rename that file or folder")
    assert local_path(str(tmp_path), "key") == tmp_path


def test_under_an_encoding_that_is_not_utf8_other_names_than_ascii_are_refused_with_the_remedy(tmp_path):
    code = (
        "import sys; from rltrain.base.storage import local_path; print(*(local_path(p, 'key') for p in sys.argv[1:]))"
    )
    command, environment = [sys.executable, "-c", code], os.environ | ASCII
    done = subprocess.run([*command, "plain", "~/x"], capture_output=True, env=environment | {"HOME": "/h"}, check=True)
    assert done.stdout == b"plain /h/x\n"
    done = subprocess.run([*command, "büro"], capture_output=True, env=environment, check=False)
    assert b"is not plain ASCII, and such names cannot be used while the locale's encoding is ascii" in done.stderr
    assert done.stderr.endswith(b"; set PYTHONUTF8=1, or LC_ALL=C.UTF-8\n")
