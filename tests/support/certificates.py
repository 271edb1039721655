"""Self-signed TLS certificates for 127.0.0.1, made with openssl."""

import subprocess
from pathlib import Path
from typing import NamedTuple


class Pair(NamedTuple):
    certificate: Path
    key: Path


def make_pair(folder: Path, name: str) -> Pair:
    pair = Pair(folder / f"{name}.crt", folder / f"{name}.key")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", f"/CN={name}", "-addext"]
    command += ["subjectAltName=IP:127.0.0.1", "-keyout", str(pair.key), "-out"]
    subprocess.run([*command, str(pair.certificate)], check=True, capture_output=True)
    return pair
