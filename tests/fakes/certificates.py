"""A test certificate authority that signs certificates for loopback addresses."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


@dataclass(frozen=True)
class Certificate:
    """Paths of a certificate and its key."""

    path: Path
    key: Path
    serial: int

    def server(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.path, self.key)
        return context


class Authority:
    """Signs certificates that are valid for a day."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self.path = folder / f"{name}.pem"
        ca = x509.BasicConstraints(ca=True, path_length=0)
        signed = self._builder(self._subject, self._key).add_extension(ca, critical=True)
        self.path.write_bytes(_pem(signed.sign(self._key, hashes.SHA256())))

    def issue(self, name: str, host: str = "127.0.0.1", *, age: timedelta = timedelta()) -> Certificate:
        """A certificate for an address; expired if ``age`` exceeds a day."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
        builder = self._builder(subject, key, age=age).add_extension(names, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        path, key_path = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        path.write_bytes(_pem(certificate))
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return Certificate(path, key_path, certificate.serial_number)

    def client(self) -> ssl.SSLContext:
        """A TLS context that trusts only this authority."""
        return ssl.create_default_context(cafile=str(self.path))

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, age: timedelta = timedelta()
    ) -> x509.CertificateBuilder:
        valid_from = datetime.now(UTC) - timedelta(hours=1) - age
        builder = x509.CertificateBuilder(self._subject, subject, key.public_key(), x509.random_serial_number())
        return builder.not_valid_before(valid_from).not_valid_after(valid_from + timedelta(days=1))


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
