"""Key files: made once, private, and refused with the reason when they are not as they should be."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdxfer.cli.keys import app
from pdxfer.core.errors import ConfigError
from pdxfer.wire.keys import load_client_security, load_server_security, new_keys


def test_new_keys_fit_each_other_and_are_private(tmp_path: Path) -> None:
    """The router admits exactly the client key of the set; files are 0600, the directory 0700."""
    paths = new_keys(tmp_path / "keys")
    assert [path.name for path in paths] == ["server.key", "server.pub", "client.key", "client.pub"]
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}
    server, client = load_server_security(tmp_path / "keys"), load_client_security(tmp_path / "keys")
    assert server.allowed == {client.public_key}


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    """A second call would lock every member out; it is refused and nothing changes."""
    new_keys(tmp_path)
    before = (tmp_path / "server.key").read_bytes()
    with pytest.raises(ConfigError, match="exist already"):
        new_keys(tmp_path)
    assert (tmp_path / "server.key").read_bytes() == before


def test_a_readable_secret_is_refused(tmp_path: Path) -> None:
    """The message is the command that repairs it."""
    new_keys(tmp_path)
    (tmp_path / "client.key").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600 .*client.key"):
        load_client_security(tmp_path)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    """No directory, no member keys, not a key: each says which file."""
    with pytest.raises(ConfigError, match="server.key: No such file.*pdxfer keys new"):
        load_server_security(tmp_path / "nowhere")
    new_keys(tmp_path)
    (tmp_path / "server.pub").write_text("short")
    with pytest.raises(ConfigError, match="server.pub is not a CURVE key: expected 40 characters, found 5"):
        load_client_security(tmp_path)
    (tmp_path / "client.pub").unlink()
    with pytest.raises(ConfigError, match="no member's public key"):
        load_server_security(tmp_path)


def test_secrets_do_not_show_in_repr(tmp_path: Path) -> None:
    """Logs and errors may print these objects."""
    new_keys(tmp_path)
    secret = (tmp_path / "client.key").read_text().strip()
    assert secret not in repr(load_client_security(tmp_path))
    assert "secret" not in repr(load_server_security(tmp_path))


def test_the_command_prints_the_files(tmp_path: Path) -> None:
    """`pdxfer keys new DIR`: one path a line on stdout."""
    result = CliRunner().invoke(app, ["new", str(tmp_path / "k")])
    assert result.exit_code == 0
    names = [Path(line).name for line in result.stdout.split()]
    assert names == ["server.key", "server.pub", "client.key", "client.pub"]


def test_a_place_where_nothing_can_be_written_is_one_line(tmp_path: Path) -> None:
    """A file where the directory should be, or a directory that is not writable."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make the directory .*/file: File exists; choose another"):
        new_keys(tmp_path / "file")
    (tmp_path / "server.key").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="cannot write key file .*/server.key: File exists"):
        new_keys(tmp_path)
