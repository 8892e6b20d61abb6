"""One file behind flags and environment: what it may say, what wins, and that nothing in it is silently ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvd.cli import main
from kvd.cli_config import options_of
from kvd_client import paths
from kvd_client.cli_lazy import loaded
from kvd_client.config_file import ConfigFileError, config_file, default_config_file, read_config_file


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No option is set by the environment that the tests run in."""
    for param in options_of(loaded(main.commands["serve"])).values():
        monkeypatch.delenv(str(param.envvar), raising=False)


def _run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, list(arguments), env=env or {})


def _show(file: Path | str, env: dict[str, str] | None = None) -> dict[str, Any]:
    result = _run("--config", str(file), "config", "show", "--json", env=env)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A good one."""
    path = tmp_path / "kvd.toml"
    path.write_text(
        f'data_dir = "{tmp_path}/data"\nmodel = "gemma3-270m"\n'
        '[serve]\nbudget = "8GB"\nmax-batch = 4\ndecode_share = 0.25\nwarm_from = ["/x", "/y"]\ncheck = true\n'
    )
    return path


def test_the_file_sets_what_nothing_stronger_sets(file: Path, tmp_path: Path) -> None:
    """Environment over file over default, each value with its source."""
    shown = _show(file, {"KVD_BUDGET": "7GB"})
    serve = shown["serve"]
    assert shown["file"] == str(file)
    assert serve["budget"] == {"value": 7_000_000_000, "source": "environment KVD_BUDGET"}
    assert serve["max_batch"] == {"value": 4, "source": f"file {file}"}
    assert serve["decode_share"]["value"] == 0.25
    assert serve["warm_from"]["value"] == ["/x", "/y"]
    assert serve["check"]["value"] is True
    assert serve["data_dir"] == {"value": f"{tmp_path}/data", "source": f"file {file}"}
    assert serve["socket"] == {"value": f"{tmp_path}/data/kvd.sock", "source": "default"}
    assert serve["model"]["value"] == "gemma3-270m"
    assert serve["quota"] == {"value": 100_000_000_000, "source": "default"}


def test_flags_win(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said on the spot wins over the file; the file's values reach the command by its own types."""
    seen: dict[str, Any] = {}
    serve = loaded(main.commands["serve"])
    monkeypatch.setattr(serve, "callback", lambda **given: seen.update(given))
    assert _run("--config", str(file), "serve", "--budget", "9GB").exit_code == 0
    assert seen["budget"] == 9_000_000_000
    assert (seen["max_batch"], seen["decode_share"], seen["model_name"]) == (4, 0.25, "gemma3-270m")
    assert seen["warm_from"] == (Path("/x"), Path("/y"))


def test_shared_names_reach_commands_below_commands(file: Path, tmp_path: Path) -> None:
    """`model_dir` at the top of the file counts for `kvd model list`, too."""
    file.write_text(f'model_dir = "{tmp_path}/nowhere"\n')
    result = _run("--config", str(file), "model", "list", "--json")
    assert result.exit_code == 0
    assert json.loads(result.output)["model_dir"] == f"{tmp_path}/nowhere"


def test_every_setting_of_serve_can_stand_in_the_file() -> None:
    """And `config show` prints each of them."""
    shown = _show("")
    assert shown["file"] is None
    assert set(shown["serve"]) == set(options_of(loaded(main.commands["serve"])))
    assert len(shown["serve"]) >= 20


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[serve]\nbuget = 1", ("[serve] buget", "did you mean budget?", "max_batch")),
        ("budget = 1", ("budget is no setting", "[serve]", "data_dir")),
        ("[gate]\nx = 1", ("gate is no setting", "[serve]")),
        ('[serve]\nbudget = "8XB"', ("[serve] budget", "8XB", "10.2GB")),
        ("[serve]\nmax_batch = 65", ("[serve] max_batch", "from 1 to 64")),
        ('[serve]\nkv_format = "q5"', ("[serve] kv_format", "'k8v4'")),
        ("[serve]\nbudget = [1, 2]", ("[serve] budget", "one value")),
        ("[serve]\nbudget = {a = 1}", ("[serve] budget", "one value")),
        ('data_dir = "relative"', ("data_dir must be an absolute path", "relative")),
        ("data_dir = 5", ("data_dir must be an absolute path", "5")),
        ("model = ", ("not valid TOML", "Invalid value")),
        ("\x00", ("not valid TOML",)),
    ],
)
def test_what_a_file_may_not_say(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    """Exit code 2 and one line that names file, key and what is allowed; the command does not run."""
    path = tmp_path / "kvd.toml"
    path.write_text(text)
    result = _run("--config", str(path), "serve")
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    for word in (str(path), *words):
        assert word in result.output


@pytest.mark.parametrize(
    ("table", "text", "words"),
    [
        ("serve", "budget = 0", ("[serve] budget: ", "at least 1000000 bytes, not 0")),
        ("serve", 'http = "foo"', ("[serve] http: ", "HOST:PORT", "foo")),
        ("serve", "chunk = 513", ("[serve] chunk: ", "512")),
        ("serve", 'namespace-quota = ["a=5"]', ("[serve] namespace_quota: ", "at least 1000000")),
        ("serve", 'swap = "off"\nwarm_from = ["/x"]', ("[serve] swap: ", "warm-from needs")),
        ("gateway", 'max_body = "1GB"', ("[gateway] max_body: ", "from 1024 to")),
        ("gateway", 'listen = "foo"', ("[gateway] listen: ", "HOST:PORT")),
        ("gateway", 'rule_off = ["x"]', ("[gateway] rule_off: ", "there is no rule x")),
        ("gateway", 'api_key_file = "/nonexistent/keys"', ("[gateway] api_key_file: ", "cannot be read")),
    ],
)
def test_a_value_out_of_its_range_is_named_with_its_place(
    tmp_path: Path, table: str, text: str, words: tuple[str, ...]
) -> None:
    """What only the settings as a whole refuse names file, table and key, too; a flag's value names no file."""
    path = tmp_path / "kvd.toml"
    path.write_text(f"[{table}]\n{text}\n")
    result = _run("--config", str(path), table)
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    for word in (str(path), *words):
        assert word in result.output


def test_a_flags_value_names_no_file(tmp_path: Path) -> None:
    """The flag is wrong, whatever the file says."""
    path = tmp_path / "kvd.toml"
    path.write_text("[serve]\nbudget = 0\n")
    result = _run("--config", str(path), "serve", "--budget", "1")
    assert result.exit_code == 2
    assert result.output == "kvd: budget must be at least 1000000 bytes, not 1\n"


def test_folders_of_the_command_line_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 2 before anything is made; those of file and environment may come later."""
    import kvd.cli_serve as cli
    import kvd.daemon as daemon

    seen: list[Any] = []
    monkeypatch.setattr(daemon, "make_private_folders", lambda data: None)
    monkeypatch.setattr(daemon, "serve", lambda settings, file: seen.append(settings))
    monkeypatch.setattr(cli, "ensure_model", lambda name, directory: Path("/m"))
    path, gone = tmp_path / "kvd.toml", tmp_path / "gone"
    path.write_text(f'[serve]\nwarm_from = ["{gone}"]\n')
    serve = ("serve", "--data-dir", str(tmp_path / "d"), "--warm-from")
    for folder, word in ((gone, "does not exist"), (path, "is no folder")):
        refused = _run("--config", "", *serve, str(tmp_path), "--warm-from", str(folder))
        assert (refused.exit_code, seen) == (2, [])
        assert refused.output.startswith(f"kvd: warm-from: {folder} {word}")
    assert _run("--config", "", *serve, str(tmp_path)).exit_code == 0
    assert _run("--config", str(path), *serve[:-1]).exit_code == 0
    assert _run("--config", "", *serve[:-1], env={"KVD_WARM_FROM": str(gone)}).exit_code == 0
    assert [each.warm_from for each in seen] == [(tmp_path,), (gone,), (gone,)]


def test_a_named_file_must_be_there(tmp_path: Path) -> None:
    """By flag and by variable; an empty name means none."""
    missing = tmp_path / "missing.toml"
    for result in (
        _run("--config", str(missing), "config", "show"),
        _run("config", "show", env={"KVD_CONFIG": str(missing)}),
    ):
        assert (result.exit_code, str(missing) in result.output) == (2, True)
    assert _run("config", "show", env={"KVD_CONFIG": ""}).exit_code == 0


def test_a_bad_variable_is_named(tmp_path: Path) -> None:
    """`config show` says which one it is."""
    result = _run("--config", "", "config", "show", env={"KVD_BUDGET": "7x"})
    assert (result.exit_code, "KVD_BUDGET" in result.output) == (2, True)


def test_the_default_file_is_platformdirs_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With and without XDG_CONFIG_HOME; only a file that is there is read."""
    platformdirs = pytest.importorskip("platformdirs")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert default_config_file().parent == Path(platformdirs.user_config_dir("kvd", appauthor=False))
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "xdg")}
    assert default_config_file(environ, platform="linux") == tmp_path / "xdg" / "kvd" / "kvd.toml"
    assert default_config_file(environ, platform="darwin").parts[-2:] == ("kvd", "kvd.toml")
    if default_config_file(environ) == tmp_path / "xdg" / "kvd" / "kvd.toml":
        assert config_file(environ=environ) is None
        (tmp_path / "xdg" / "kvd").mkdir(parents=True)
        (tmp_path / "xdg" / "kvd" / "kvd.toml").write_text('data_dir = "/f"')
        assert paths.resolve_socket(None, None, environ) == Path("/f/kvd.sock")
        assert _run("config", "path", env={**environ, "KVD_CONFIG": ""}).exit_code == 0


def test_clients_look_where_the_file_says(tmp_path: Path) -> None:
    """Argument, environment, file, default; a folder that is named on the spot means its own socket."""
    path = tmp_path / "kvd.toml"
    path.write_text('data_dir = "/f"\nsocket = "/f/s.sock"\n[serve]\nanything = 1\n')
    environ = {"KVD_CONFIG": str(path)}
    assert paths.resolve_socket(None, None, environ) == Path("/f/s.sock")
    assert paths.resolve_socket(None, "/a", environ) == Path("/a/kvd.sock")
    assert paths.resolve_socket(None, None, environ | {"KVD_DATA_DIR": "/e"}) == Path("/e/kvd.sock")
    assert paths.resolve_socket(None, None, environ | {"KVD_SOCKET": "/e/s"}) == Path("/e/s")
    assert paths.resolve_data_dir(None, environ) == Path("/f")
    path.write_text('socket = "s.sock"')
    with pytest.raises(ConfigFileError, match="absolute path"):
        paths.resolve_socket(None, None, environ)


def test_a_folder_named_on_the_spot_means_its_own_socket(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kvd --config FILE serve --data-dir X` listens where `kvd-client --data-dir X` looks."""
    file.write_text(f'data_dir = "{tmp_path}/d"\nsocket = "{tmp_path}/s.sock"\n')
    import kvd.cli_serve as cli
    import kvd.daemon as daemon

    seen: list[Any] = []
    monkeypatch.setattr(daemon, "make_private_folders", lambda data: None)
    monkeypatch.setattr(daemon, "serve", lambda settings, file: seen.append(settings))
    monkeypatch.setattr(cli, "ensure_model", lambda name, directory: Path("/m"))
    assert _run("--config", str(file), "serve").exit_code == 0
    assert _run("--config", str(file), "serve", "--data-dir", str(tmp_path / "x")).exit_code == 0
    assert [each.socket for each in seen] == [tmp_path / "s.sock", tmp_path / "x" / "kvd.sock"]


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """A folder in its place, or far too long a file."""
    with pytest.raises(ConfigFileError, match=str(tmp_path)):
        read_config_file(tmp_path)
    big = tmp_path / "big"
    big.write_text("#" * (1 << 20) + "\n")
    with pytest.raises(ConfigFileError, match="more than"):
        read_config_file(big)


def test_values_are_shown_as_they_are_written(tmp_path: Path) -> None:
    """What `config show` prints can be given back: sizes without loss, percentages, `off`, `true`."""
    file = tmp_path / "kvd.toml"
    file.write_text(
        '[serve]\nbudget = "1GiB"\nquota = 1234567891\npin_limit = "40%"\nnamespace_quota = ["a=b=4GB"]\ncheck = true\n'
        '[gateway]\nmax_body = "8MiB"\ndefault_max_tokens = 1000000\n'
    )
    text = _run("--config", str(file), "config", "show").output
    shown = {line.split()[0]: line.split()[1] for line in text.splitlines() if line.startswith("  ")}
    assert shown["budget"] == "1GiB"
    assert shown["quota"] == "1234567891"
    assert (shown["pin_limit"], shown["write_limit"], shown["check"]) == ("40%", "off", "true")
    assert (shown["namespace_quota"], shown["max_body"]) == ("a=b=4GB", "8MiB")
    assert (shown["default_max_tokens"], shown["drain_grace"]) == ("1000000", "30")
    limited = _run("--config", "", "config", "show", env={"KVD_WRITE_LIMIT": "500MB/min"}).output
    assert "500MB/min" in limited


def test_the_file_for_programs(file: Path) -> None:
    """`config path --json`: the file, and whether it is read."""
    assert json.loads(_run("--config", str(file), "config", "path", "--json").output) == {
        "file": str(file),
        "read": True,
    }
    assert json.loads(_run("--config", "", "config", "path", "--json").output)["read"] is False


@pytest.mark.parametrize(
    ("option", "value"), [("--decode-share", "0.96"), ("--chunk", "513"), ("--drain-grace", "1e6")]
)
def test_ranges_of_serve_are_stated_by_its_options(option: str, value: str) -> None:
    """The help shows the most that is taken, and what is beyond it is refused by the option's name, exit code 2."""
    refused = _run("serve", option, value)
    assert refused.exit_code == 2
    assert f"'{option}'" in refused.output
    assert "range" in refused.output
