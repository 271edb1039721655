"""TLS certificates for 127.0.0.1, made with openssl: self-signed, and of an old authority."""

import subprocess
from pathlib import Path
from typing import NamedTuple


class Pair(NamedTuple):
    certificate: Path
    key: Path


NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
AUTHORITY = "keyUsage=critical,digitalSignature,keyCertSign"


def make_pair(folder: Path, name: str, extension: str = "subjectAltName=IP:127.0.0.1") -> Pair:
    """A certificate that signs itself."""
    pair = Pair(folder / f"{name}.crt", folder / f"{name}.key")
    subject = ("-days", "2", "-subj", f"/CN={name}", "-addext", extension)
    files = ("-keyout", str(pair.key), "-out", str(pair.certificate))
    _openssl("req", "-x509", *NEW_KEY, *subject, *files)
    return pair


def sign(authority: Pair, folder: Path, name: str, days: int = 2) -> Pair:
    """A certificate of an authority without its key identifier, as Kubernetes made them before
    1.17; with a negative number of ``days`` it has expired.
    """
    pair = Pair(folder / f"{name}.crt", folder / f"{name}.key")
    request, extensions = folder / f"{name}.csr", folder / f"{name}.ext"
    extensions.write_text("subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=none\n")
    _openssl(
        "req", *NEW_KEY, "-subj", f"/CN={name}", "-keyout", str(pair.key), "-out", str(request)
    )
    signer = ("-CA", str(authority.certificate), "-CAkey", str(authority.key), "-CAcreateserial")
    what = ("-days", str(days), "-extfile", str(extensions), "-out", str(pair.certificate))
    _openssl("x509", "-req", "-in", str(request), *signer, *what)
    return pair


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
