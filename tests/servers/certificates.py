"""Certificates for the TLS servers of tests, of an authority that nobody knows."""

import subprocess
from pathlib import Path


def make_certificates(place: Path) -> Path:
    """ca.pem, server.pem and server.key for localhost and 127.0.0.1, in `place`."""
    place.mkdir(parents=True, exist_ok=True)
    names = place / "names"
    names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for line in (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=ca -keyout ca.key -out ca.pem",
        "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=localhost -keyout server.key -out server.csr",
        "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names -out server.pem",
    ):
        subprocess.run(["openssl", *line.split()], cwd=place, check=True, capture_output=True)
    return place
