"""The job's certificate: RFC 8032's own examples, and what OpenSSL makes of the result."""

import ssl

import pytest

from poseidon.wire.certificate import armour, make_certificate, private_key, public_half, sign
from poseidon.wire.secret import JobSecret
from poseidon.wire.tls import Tls

# RFC 8032, section 7.1: key, public half, message, signature.
EXAMPLES = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25b"
        "f5f0595bbe24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b"
        "2eaeb4302aeeb00d291612bb0c00",
    ),
]


@pytest.mark.parametrize(("key", "public", "message", "signature"), EXAMPLES)
def test_keys_and_signatures_are_those_of_the_standard(key, public, message, signature):
    assert public_half(bytes.fromhex(key)).hex() == public
    assert sign(bytes.fromhex(key), bytes.fromhex(message)).hex() == signature


def test_openssl_agrees_that_key_and_certificate_belong_together(tmp_path):
    one, other = bytes(range(32)), bytes(range(1, 33))
    files = tmp_path / "job.pem"
    files.write_bytes(armour("CERTIFICATE", make_certificate(one, "job")) + armour("PRIVATE KEY", private_key(one)))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_cert_chain(files)
    context.load_verify_locations(files)
    assert context.cert_store_stats()["x509"] == 1
    files.write_bytes(armour("CERTIFICATE", make_certificate(one, "job")) + armour("PRIVATE KEY", private_key(other)))
    with pytest.raises(ssl.SSLError, match="KEY_VALUES_MISMATCH"):
        context.load_cert_chain(files)


def test_the_certificate_follows_from_the_secret_alone():
    key = JobSecret(b"s" * 32).derive("tls key")
    assert make_certificate(key, "job") == make_certificate(JobSecret(b"s" * 32).derive("tls key"), "job")
    assert make_certificate(key, "job") != make_certificate(JobSecret(b"t" * 32).derive("tls key"), "job")


def test_nothing_older_than_tls_1_3_is_spoken_and_nobody_goes_unchecked():
    tls = Tls(JobSecret(b"s" * 32))
    for context in (tls._listening, tls._connecting):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.cert_store_stats()["x509"] == 1
