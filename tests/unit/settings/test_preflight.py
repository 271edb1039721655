"""The checks of files and addresses before the start: each refusal names the flag and the fix."""

import errno
import socket
from pathlib import Path

import pytest

from fairlead_runtime.front.doors import listen
from fairlead_runtime.settings import preflight
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from support.ip_families import loopbacks, without_ipv6


def refused(config: EngineConfig) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        preflight.check_record(config)
    assert error.value.hint
    return error.value


def test_a_writable_record_is_accepted_and_no_file_is_left(
    tmp_path: Path,
) -> None:
    preflight.check_record(EngineConfig())
    preflight.check_record(EngineConfig(record=str(tmp_path / "run.jsonl")))
    assert not list(tmp_path.iterdir())


def test_an_existing_recording_stays_unchanged(tmp_path: Path) -> None:
    earlier = tmp_path / "run.jsonl"
    earlier.write_text("an earlier run\n")
    preflight.check_record(EngineConfig(record=str(earlier)))
    assert earlier.read_text() == "an earlier run\n"


@pytest.mark.parametrize(("name", "reason"), [("", "Is a directory"), ("none/x", "No such file")])
def test_a_record_that_cannot_be_written_is_named(name: str, reason: str, tmp_path: Path) -> None:
    error = refused(EngineConfig(record=str(tmp_path / name)))
    assert error.field == "record"
    assert reason in str(error)


def test_a_record_over_the_file_of_api_keys_is_refused(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key\n")
    error = refused(
        EngineConfig(record=str(tmp_path / ".." / tmp_path.name / "keys"), api_key_file=str(keys))
    )
    assert "is the file of --api-key-file" in str(error)
    assert keys.read_text() == "a-key\n"


@pytest.mark.parametrize(
    "host", ["", "[::1]", "a..b", "ü" * 80 + ".example", "192.0.2.1", "2001:db8::1"]
)
def test_a_host_that_cannot_be_used_names_the_hosts_flag_and_the_form(host: str) -> None:
    with pytest.raises(ConfigError) as error:
        preflight.listen("port", host, 0, 1)
    assert error.value.field == "host"
    assert "0.0.0.0 for all" in error.value.hint
    assert len(str(error.value)) < 400


def test_a_port_in_use_or_out_of_range_names_the_ports_flag() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match="Address already in use") as error,
    ):
        preflight.listen("admin_port", "127.0.0.1", taken.getsockname()[1], 1)
    assert error.value.field == "admin_port"
    with pytest.raises(ConfigError, match="70000 is not a port"):
        preflight.listen("port", "127.0.0.1", 70000, 1)


def test_two_colons_listen_on_every_family_of_the_machine_on_both_ports() -> None:
    for listener in listen("::", 0, 0):
        with listener:
            for address in loopbacks():
                with socket.create_connection((address, listener.getsockname()[1])):
                    pass


@pytest.mark.parametrize("reason", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
def test_two_colons_listen_on_ipv4_where_there_is_no_ipv6(
    reason: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_ipv6(monkeypatch, reason)
    with preflight.listen("port", "::", 0, 1) as listener:
        assert listener.family == socket.AF_INET
        with socket.create_connection(("127.0.0.1", listener.getsockname()[1])):
            pass


def test_two_colons_and_a_port_in_use_name_the_ports_flag() -> None:
    with (
        preflight.listen("port", "::", 0, 1) as taken,
        pytest.raises(ConfigError, match="--port: cannot listen on ::") as error,
    ):
        preflight.listen("port", "::", taken.getsockname()[1], 1)
    assert error.value.field == "port"


def test_a_free_port_is_listened_on() -> None:
    with preflight.listen("port", "127.0.0.1", 0, 1) as listener:
        assert listener.getsockname()[1] > 0
        with socket.create_connection(listener.getsockname()[:2]):
            pass
