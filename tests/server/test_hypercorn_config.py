"""Hypercorn's settings: each that it knows is honoured, or refused with a reason; and nothing else is one."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import Any

import hypercorn
import pytest
from certificates import PASSWORD, Certificates
from hypercorn.config import Config

from trioleg.errors import InvalidRequestError
from trioleg.server.hypercorn_config import HypercornSettings, read_hypercorn_config

# Of Config's own attributes those that are no settings.
NO_SETTINGS = {"log", "ssl_enabled"}


def settings(**named: Any) -> HypercornSettings:
    return HypercornSettings.of(Config.from_mapping(named))


def with_tls(certificates: Certificates, **more: Any) -> HypercornSettings:
    pair = {"certfile": certificates.pem("server"), "keyfile": certificates.key("server")}
    return settings(**{**pair, **more})


def hypercorns_settings() -> list[str]:
    names = {name for name in dir(Config) if not name.startswith("_")} | set(Config.__annotations__)
    methods = {name for name in names if callable(getattr(Config, name, None))}
    return sorted(
        {name for name in names - methods - NO_SETTINGS if not name.startswith("_")}
        | {"logger_class"}
    )


@pytest.mark.parametrize("name", hypercorns_settings())
def test_every_setting_of_hypercorns_is_known(name: str) -> None:
    """By a value that none of them takes: the refusal names it and says what is allowed."""
    if name == "cert_reqs":
        return  # from a program it is verify_mode; from a file: see below
    config = Config()
    setattr(config, "_root_path" if name == "root_path" else name, object())
    with pytest.raises(InvalidRequestError, match=rf"^{name} is <object .*; allowed: ") as caught:
        HypercornSettings.of(config)
    assert caught.value.parameter == name


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("workers", 2, "one process"),
        ("worker_class", "uvloop", "trio"),
        ("worker_class", "asyncio", "trio"),
        ("quic_bind", "127.0.0.1:4433", "HTTP/3"),
        ("use_reloader", True, "false"),
        ("daemon", True, "one process"),
        ("h2_max_concurrent_streams", 100, "HTTP/2"),
        ("websocket_ping_interval", 20.0, "WebSockets"),
        ("wsgi_max_body_size", 1, "WSGI"),
        ("max_requests", 100, "one process"),
        ("statsd_host", "localhost:8125", "Prometheus"),
        ("keep_alive_max_requests", 1000, "nothing piles up"),
        ("pid_path", "/run/x.pid", "knows its process"),
        ("read_timeout", 5, "keep_alive_timeout"),
        ("bind", [], "HOST:PORT"),
        ("bind", "::1", "[IPV6]:PORT"),
        ("backlog", 0, "an integer from 1 on"),
        ("keep_alive_timeout", -1, "seconds"),
        ("keep_alive_timeout", "5", "seconds"),
        ("loglevel", "loud", "debug"),
        ("umask", 0o1000, "permission bits"),
        ("ca_certs", "/ca.pem", "with certfile and keyfile"),
        ("insecure_bind", ":80", "with certfile and keyfile"),
        ("certfile", "/server.pem", "both"),
        ("no_such_setting", 1, "accesslog, "),
        ("accesslog", "/no/such/folder/log", "cannot be logged to"),
        ("logconfig_dict", {"version": 2}, "cannot be logged to"),
    ],
)
def test_a_refusal_names_the_setting_and_says_why(name: str, value: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        settings(**{name: value})
    assert str(caught.value).startswith(name)
    assert reason in str(caught.value)
    assert caught.value.parameter == name


@pytest.mark.parametrize(
    "named",
    [
        {"workers": 1, "worker_class": "trio", "quic_bind": [], "use_reloader": False},
        {"max_requests": None, "statsd_host": None, "debug": False, "pid_path": None},
    ],
)
def test_what_says_no_more_than_is_so_is_taken(named: dict[str, Any]) -> None:
    settings(**named)


def test_only_what_was_set_counts() -> None:
    assert settings().limits == {}
    assert HypercornSettings.of(None).bind is None
    config = Config()
    assert config.log is config.log  # Hypercorn's own state, which is no setting
    assert HypercornSettings.of(config).limits == {}


def test_where_each_goes() -> None:
    found = settings(
        bind=["127.0.0.1:1", "unix:/s"],
        backlog=7,
        umask=0o77,
        user=1,
        group=2,
        graceful_timeout=1,
        keep_alive_timeout=2.5,
        h11_max_incomplete_size=4096,
        root_path="/llm/",
        server_names=["localhost"],
        include_date_header=False,
        max_app_queue_size=3,
        startup_timeout=4,
        shutdown_timeout=5,
    )
    assert found.bind == ("127.0.0.1:1", "unix:/s")
    assert (found.backlog, found.umask, found.user, found.group) == (7, 0o77, 1, 2)
    assert found.limits == {
        "graceful_timeout": 1,
        "keep_alive_timeout": 2.5,
        "max_head_bytes": 4096,
    }
    protocol = found.protocol
    assert (protocol.root_path, protocol.server_names) == ("/llm", ["localhost"])
    assert (protocol.include_date_header, protocol.max_app_queue_size) == (False, 3)
    assert (protocol.startup_timeout, protocol.shutdown_timeout) == (4, 5)


def test_tls(certificates: Certificates) -> None:
    found = with_tls(
        certificates,
        ca_certs=certificates.pem("ca"),
        verify_mode="CERT_REQUIRED",
        verify_flags=["VERIFY_X509_STRICT"],
        ciphers="ECDHE+CHACHA20",
        ssl_handshake_timeout=3,
        alpn_protocols=["http/1.1"],
        insecure_bind=["127.0.0.1:1"],
    )
    assert found.tls is not None
    assert found.tls.verify_mode == ssl.CERT_REQUIRED
    assert found.tls.verify_flags & ssl.VERIFY_X509_STRICT
    assert found.tls.minimum_version == ssl.TLSVersion.TLSv1_2
    older = {one["name"] for one in found.tls.get_ciphers() if one["protocol"] == "TLSv1.2"}
    assert older
    assert all("CHACHA20" in one for one in older)
    assert found.limits == {"handshake_timeout": 3}
    assert found.insecure_bind == ("127.0.0.1:1",)


@pytest.mark.parametrize(
    ("named", "parameter", "sentence"),
    [
        ({"certfile": "/no.pem"}, "certfile", "No such file"),
        ({"keyfile": "/no.key"}, "keyfile", "No such file"),
        ({"ca_certs": "/no.pem"}, "ca_certs", "No such file"),
        ({"ca_certs": __file__}, "ca_certs", "a PEM file with certificates"),
        ({"certfile": __file__}, "certfile", "a PEM certificate"),
        ({"keyfile": __file__}, "certfile", "its PEM key"),
        ({"ciphers": "HOPE"}, "ciphers", "OpenSSL"),
        ({"verify_mode": "CERT_REQUIRED"}, "verify_mode", "with ca_certs"),
        ({"verify_mode": "required"}, "verify_mode", "CERT_NONE, CERT_OPTIONAL"),
        ({"verify_mode": 9}, "verify_mode", "CERT_NONE, CERT_OPTIONAL"),
        ({"verify_flags": "STRICT"}, "verify_flags", "VERIFY_X509_STRICT"),
        ({"alpn_protocols": ["h2", "http/1.1"]}, "alpn_protocols", "HTTP/2 is not spoken"),
        ({"keyfile_password": 7}, "keyfile_password", "a string"),
    ],
)
def test_what_is_wrong_with_tls(
    named: dict[str, Any], parameter: str, sentence: str, certificates: Certificates
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        with_tls(certificates, **named)
    assert sentence in str(caught.value)
    assert caught.value.parameter == parameter


def test_keys_that_do_not_open(certificates: Certificates) -> None:
    with pytest.raises(InvalidRequestError, match=r"the key of the certificate in .*server\.pem"):
        with_tls(certificates, keyfile=certificates.key("client"))
    locked = certificates.key("locked")
    # Nobody is asked at the terminal.
    with pytest.raises(InvalidRequestError, match="it needs keyfile_password"):
        with_tls(certificates, keyfile=locked)
    with pytest.raises(InvalidRequestError, match="keyfile_password does not open"):
        with_tls(certificates, keyfile=locked, keyfile_password="wrong")
    assert with_tls(certificates, keyfile=locked, keyfile_password=PASSWORD).tls is not None


def test_a_toml_file(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('bind = ["127.0.0.1:9", "unix:/s"]\nkeep_alive_timeout = 12.5\n')
    found = HypercornSettings.of(read_hypercorn_config(file))
    assert found.bind == ("127.0.0.1:9", "unix:/s")
    assert found.limits == {"keep_alive_timeout": 12.5}


def test_a_python_file(tmp_path: Path) -> None:
    file = tmp_path / "server.py"
    file.write_text(
        "from __future__ import annotations\nimport os\nfrom pathlib import Path\n"
        "_port = 9\ndef where() -> str:\n    return f'127.0.0.1:{_port}'\n"
        "class Mine: pass\nbind = where()\naccess_log_format = os.path.basename(__file__)\n"
    )
    found = HypercornSettings.of(read_hypercorn_config(file))
    assert found.bind == ("127.0.0.1:9",)
    assert found.protocol.access_log_format == "server.py"


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.toml", "bind = ", "is no TOML"),
        ("a.toml", "binds = 'x'", "binds is no setting of Hypercorn's"),
        ("a.toml", "root_path = 5", 'root_path is 5; allowed: ""'),
        ("a.toml", "cert_reqs = 2", "allowed: verify_mode"),
        ("a.toml", "[server]\nbind = ':80'", "server is no setting"),
        ("a.py", "binds = 'x'", "binds is no setting of Hypercorn's"),
        ("a.py", "bind = undefined", "does not run: NameError: name 'undefined'"),
        ("a.py", "bind = (", "does not run: SyntaxError"),
        ("a.ini", "", "ends in .toml or .py"),
    ],
)
def test_files_that_are_refused(name: str, text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(InvalidRequestError) as caught:
        read_hypercorn_config(file)
    assert sentence in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"none\.toml cannot be read: No such file"):
        read_hypercorn_config(tmp_path / "none.toml")
    (tmp_path / "odd.toml").write_bytes(b"\xff")
    with pytest.raises(InvalidRequestError, match=r"odd\.toml cannot be read: 'utf-8'"):
        read_hypercorn_config(tmp_path / "odd.toml")


def test_the_log_files_are_open_for_as_long_as_it_serves(tmp_path: Path) -> None:
    error, access = tmp_path / "error.log", tmp_path / "access.log"
    found = settings(accesslog=str(access), errorlog=str(error), loglevel="warning")
    with found.logging():
        logging.getLogger("trioleg.server").warning("told")
    logging.getLogger("trioleg.server").warning("too late")
    assert "told" in error.read_text()
    assert "too late" not in error.read_text()
    assert access.read_text() == ""


def test_hypercorns_name_is_the_one_that_programs_use() -> None:
    assert hypercorn.Config is Config
