"""Certificates for the tests of TLS: an authority of their own, a server and a client that it signed, and odd ones.

Made with the ``openssl`` command, once for a run.
"""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

PASSWORD = "correct horse"

_CONFIG = """
[req]
distinguished_name = name
prompt = no
[name]
CN = tests of trioleg
[ca]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[server]
subjectAltName = DNS:localhost, IP:127.0.0.1
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
[client]
extendedKeyUsage = clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
"""


@dataclass(frozen=True)
class Certificates:
    """Each name is a PEM certificate, NAME.pem, with its key, NAME.key; ``ca`` signed server and client."""

    folder: Path

    def pem(self, name: str) -> str:
        return str(self.folder / f"{name}.pem")

    def key(self, name: str) -> str:
        return str(self.folder / f"{name}.key")

    def context(self, client: str | None = None) -> ssl.SSLContext:
        """A client's, which believes this authority alone."""
        context = ssl.create_default_context(cafile=self.pem("ca"))
        if client is not None:
            context.load_cert_chain(self.pem(client), self.key(client))
        return context


def make_certificates(folder: Path) -> Certificates:
    made = Certificates(folder)
    config = folder / "openssl.cnf"
    config.write_text(_CONFIG)

    def openssl(*arguments: str) -> None:
        command = ["openssl", *arguments]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)

    def certificate(name: str, extensions: str, *more: str) -> None:
        openssl(
            *("req", "-x509", "-config", str(config), "-extensions", extensions, "-days", "2"),
            *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", made.key(name), "-out", made.pem(name), *more),
        )

    signed = ("-CA", made.pem("ca"), "-CAkey", made.key("ca"))
    certificate("ca", "ca")
    certificate("server", "server", *signed)
    certificate("client", "client", *signed)
    certificate("stranger", "client")
    locked = ("-aes256", "-passout", f"pass:{PASSWORD}")
    openssl("ec", "-in", made.key("server"), *locked, "-out", made.key("locked"))
    return made
