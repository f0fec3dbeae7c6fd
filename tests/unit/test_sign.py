"""Signatures: who signed what, that nothing changed since, and what a reproduction repeats."""

from __future__ import annotations

import base64
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from small_run import REFERENCE, make_run

from kit import store
from kit.errors import BadFile, KitError, NotFound, SignatureWrong, UsageError
from kit.manifest import Original, load_manifest, manifest_json
from kit.sign import make_key, sign, signature_of, verify, verify_chain
from kit.statement import PREDICATE_TYPE, STATEMENT_TYPE, make_statement


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    for name in ("mine", "yours"):
        make_key(folder / name)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, keys: Path) -> Path:
    run = make_run(tmp_path_factory.mktemp("runs") / "run")
    sign(run, keys / "mine")
    return run


@pytest.fixture
def run(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "run"))


@pytest.fixture
def public(keys: Path) -> Path:
    return keys / "mine.pub"


def payload_of(run: Path) -> dict[str, Any]:
    envelope = json.loads((run / "manifest.dsse.json").read_bytes())
    return dict(json.loads(base64.b64decode(envelope["payload"])))


def test_who_signed_is_said_and_every_file_is_checked(run: Path, public: Path) -> None:
    found = verify(run, public)
    assert (found.state, found.raw) == ("verified", "all as recorded")
    assert found.key_ids == verify(run).key_ids
    assert len(found.key_ids[0]) == 64
    assert verify(run).state == "declared"


def test_the_statement_is_an_in_toto_statement_about_the_manifest(run: Path) -> None:
    payload, manifest = payload_of(run), load_manifest(run / "manifest.json")
    assert payload["_type"] == STATEMENT_TYPE
    assert payload["predicateType"] == PREDICATE_TYPE
    digest = {"sha256": store.sha256_file(run / "manifest.json")}
    assert payload["subject"] == [{"name": manifest.run_id, "digest": digest}]
    predicate = payload["predicate"]
    assert predicate["plan_sha256"] == manifest.plan_sha256
    assert manifest.verdict is not None
    assert predicate["verdict"]["word"] == manifest.verdict.word
    materials = {m["name"]: m["digest"] for m in predicate["materials"]}
    image, plan = manifest.images[0], manifest.plan
    assert materials[f"image/{image.id}"] == {"sha256": image.identity[7:]}
    assert materials["kit"] == {"gitCommit": manifest.kit.commit}
    for name, sha256 in plan.model.files.items():
        assert materials[f"model/{plan.model.id}/{name}"] == {"sha256": sha256}
    for phase in plan.phases:
        assert materials[f"workload/{phase.name}.jsonl"] == {"sha256": phase.requests_sha256}
    assert predicate["reproduces"] is None


def test_the_envelope_is_dsse_for_any_other_reader(run: Path, public: Path) -> None:
    """Verified with nothing of the kit or its library: DSSE's own pre-authentication encoding."""
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    envelope = json.loads((run / "manifest.dsse.json").read_bytes())
    body, kind = base64.b64decode(envelope["payload"]), envelope["payloadType"].encode()
    assert kind == b"application/vnd.in-toto+json"
    encoded = b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(body), body)
    key: Any = load_pem_public_key(public.read_bytes())
    key.verify(base64.b64decode(envelope["signatures"][0]["sig"]), encoded)


def test_signing_again_gives_the_same_bytes(run: Path, keys: Path) -> None:
    before = signature_of(run / "manifest.json").read_bytes()
    sign(run / "manifest.json", keys / "mine")
    assert signature_of(run / "manifest.json").read_bytes() == before


def test_another_key_does_not_fit(run: Path, keys: Path) -> None:
    with pytest.raises(SignatureWrong, match="no signature by this key"):
        verify(run, keys / "yours.pub")


def test_a_signature_moved_to_another_key_id_does_not_fit(run: Path, keys: Path) -> None:
    path = run / "manifest.dsse.json"
    envelope = json.loads(path.read_bytes())
    sign(run, keys / "yours")
    envelope["signatures"][0]["keyid"] = json.loads(path.read_bytes())["signatures"][0]["keyid"]
    path.write_text(json.dumps(envelope, indent=1, sort_keys=True) + "\n", "utf-8")
    with pytest.raises(SignatureWrong):
        verify(run, keys / "yours.pub")


def test_a_changed_raw_file_is_named(run: Path, public: Path) -> None:
    samples = next(run.rglob("measure/samples.jsonl"))
    body = bytearray(samples.read_bytes())
    body[len(body) // 2] ^= 1
    samples.write_bytes(body)
    with pytest.raises(SignatureWrong, match=r"measure/samples\.jsonl"):
        verify(run, public)


def test_what_is_not_as_recorded_is_not_signed(run: Path, keys: Path) -> None:
    next(run.rglob("measure/samples.jsonl")).unlink()
    with pytest.raises(SignatureWrong, match=r"samples\.jsonl: missing"):
        sign(run, keys / "mine")


def flip(path: Path, rng: random.Random) -> None:
    body = bytearray(path.read_bytes())
    body[rng.randrange(len(body))] ^= rng.randrange(1, 256)
    path.write_bytes(body)


@pytest.mark.parametrize("name", ["manifest.json", "manifest.dsse.json"])
def test_a_flipped_byte_of_manifest_or_signature_is_found(
    name: str, run: Path, public: Path
) -> None:
    rng, whole = random.Random(7), (run / name).read_bytes()
    for _ in range(60):
        (run / name).write_bytes(whole)
        flip(run / name, rng)
        with pytest.raises((SignatureWrong, BadFile), match="manifest"):
            verify(run, public)


def forge(run: Path, change: Callable[[dict[str, Any]], object], key: Path) -> None:
    """Sign another statement than the kit would make, with a key that is trusted."""
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import CryptoSigner

    payload = payload_of(run)
    change(payload)
    private = load_pem_private_key(key.read_bytes(), None)
    envelope = Envelope(json.dumps(payload).encode(), "application/vnd.in-toto+json", {})
    envelope.sign(CryptoSigner(private))
    text = json.dumps(envelope.to_dict(), indent=1, sort_keys=True) + "\n"
    (run / "manifest.dsse.json").write_text(text, "utf-8")


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "verdict": lambda s: s["predicate"]["verdict"].update(word="supported"),
    "plan": lambda s: s["predicate"].update(plan_sha256="0" * 64),
    "material": lambda s: s["predicate"]["materials"][0].update(digest={"sha256": "0" * 64}),
    "run": lambda s: s["subject"][0].update(name="another"),
    "digest": lambda s: s["subject"][0].update(digest={"sha256": "0" * 64}),
    "reproduces": lambda s: s["predicate"].update(
        reproduces={
            "run_id": "x",
            "manifest_sha256": "0" * 64,
            "outcome": "reproduced",
            "record_sha256": "0" * 64,
        }
    ),
    "type": lambda s: s.update(_type="https://in-toto.io/Statement/v0.1"),
    "predicate type": lambda s: s.update(predicateType="urn:uuid:0"),
    "two subjects": lambda s: s["subject"].append(s["subject"][0]),
    "no predicate": lambda s: s.pop("predicate"),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_signed_statement_that_the_files_do_not_make_is_wrong(
    case: str, run: Path, keys: Path
) -> None:
    forge(run, FORGED[case], keys / "mine")
    with pytest.raises(SignatureWrong):
        verify(run, keys / "mine.pub")


def test_a_reference_is_checked_in_its_archive(keys: Path, tmp_path: Path) -> None:
    manifest = tmp_path / REFERENCE.name
    archive = REFERENCE.with_suffix(".tar.xz")
    shutil.copy(REFERENCE, manifest)
    sign(manifest, keys / "mine")
    assert verify(manifest, keys / "mine.pub").raw == "not at hand"
    shutil.copy(archive, tmp_path)
    assert verify(manifest, keys / "mine.pub").raw == "all as recorded"
    assert signature_of(manifest).name == REFERENCE.stem + ".dsse.json"
    other = make_run(tmp_path / "run")
    (other / "plan.json").write_bytes(b"{}")
    import tarfile

    with tarfile.open(tmp_path / archive.name, "w:xz") as members:
        for name in load_manifest(manifest).files:
            members.add(other / name, arcname=name)
    with pytest.raises(SignatureWrong, match=r"plan\.json"):
        verify(manifest, keys / "mine.pub")
    (tmp_path / archive.name).write_bytes(archive.read_bytes()[:-1000])
    with pytest.raises((BadFile, SignatureWrong)):
        verify(manifest, keys / "mine.pub")


def test_a_run_without_signature_is_not_found(run: Path) -> None:
    (run / "manifest.dsse.json").unlink()
    with pytest.raises(NotFound, match="not signed"):
        verify(run)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"payload": 1}', "[" * 100_000,
     '{"payload": "x", "payloadType": "y", "signatures": [{"keyid": "a", "sig": "!"}]}'],
)  # fmt: skip
def test_an_envelope_that_is_none_is_one_clear_error(text: str, run: Path) -> None:
    (run / "manifest.dsse.json").write_text(text, "utf-8")
    with pytest.raises((BadFile, SignatureWrong), match=r"manifest\.dsse\.json"):
        verify(run)


# A reproduction


@pytest.fixture
def again(run: Path, tmp_path: Path, keys: Path) -> Path:
    """A second run whose record says that it repeats the first."""
    folder = Path(shutil.copytree(run, tmp_path / "again"))
    manifest = load_manifest(run / "manifest.json")
    original = Original(
        run_id=manifest.run_id,
        manifest_sha256=store.sha256_file(run / "manifest.json"),
        plan_sha256=manifest.plan_sha256,
        accepted=(),
    )
    changes = {"run_id": "20270101t000000abcdef", "reproduces": original}
    text = manifest_json(manifest.model_copy(update=changes))
    store.write_text(folder / "manifest.json", text)
    record = {
        "original": original.model_dump(mode="json"),
        "again_sha256": store.sha256_file(folder / "manifest.json"),
        "outcome": {"word": "reproduced", "reason": "within the bounds"},
    }
    store.write_json(folder / "reproduction.json", record)
    sign(folder, keys / "yours")
    return folder


def test_a_reproduction_names_its_original_and_how_it_ended(
    run: Path, again: Path, keys: Path
) -> None:
    told = make_statement(again / "manifest.json").predicate.reproduces
    assert told is not None
    assert (told.outcome, told.run_id) == (
        "reproduced",
        load_manifest(run / "manifest.json").run_id,
    )
    chain = verify_chain([run, again], [keys / "mine.pub", keys / "yours.pub"])
    assert [one.state for one in chain] == ["verified", "verified"]
    assert chain[0].key_ids != chain[1].key_ids


def test_a_chain_breaks_where_a_key_a_link_or_an_order_is_wrong(
    run: Path, again: Path, keys: Path
) -> None:
    both = [keys / "mine.pub", keys / "yours.pub"]
    with pytest.raises(SignatureWrong, match="no signature by this key"):
        verify_chain([run, again], both[:1])
    with pytest.raises(SignatureWrong, match="not as a reproduction"):
        verify_chain([again, run], both)
    with pytest.raises(SignatureWrong, match="repeats another run"):
        verify_chain([again, again], both)
    with pytest.raises(UsageError):
        verify_chain([run, again], [])


def test_a_changed_or_missing_record_is_found(again: Path, keys: Path) -> None:
    record = again / "reproduction.json"
    whole = record.read_bytes()
    record.write_bytes(whole.replace(b"within", b"beyond"))
    with pytest.raises(SignatureWrong, match="record_sha256"):
        verify(again, keys / "yours.pub")
    record.write_bytes(whole.replace(b'"reproduced"', b'"excellent"'))
    with pytest.raises(BadFile, match="outcome"):
        verify(again, keys / "yours.pub")
    record.unlink()
    with pytest.raises(SignatureWrong, match="reproduces"):
        verify(again, keys / "yours.pub")


def test_a_reproduction_signed_without_its_record_ends_no_chain(
    run: Path, again: Path, keys: Path
) -> None:
    (again / "reproduction.json").unlink()
    sign(again, keys / "yours")
    told = verify(again, keys / "yours.pub").statement.predicate.reproduces
    assert told is not None
    assert told.outcome is None
    with pytest.raises(SignatureWrong, match="without its outcome"):
        verify_chain([run, again], [keys / "mine.pub", keys / "yours.pub"])


def test_a_record_of_another_run_is_not_signed(run: Path, again: Path, keys: Path) -> None:
    shutil.copy(again / "reproduction.json", run)
    with pytest.raises(BadFile, match="not the record of the manifest"):
        sign(run, keys / "mine")


# Keys


def test_a_private_key_is_for_its_owner_alone(keys: Path) -> None:
    assert (keys / "mine").stat().st_mode & 0o777 == 0o600
    assert (keys / "mine").read_bytes().startswith(b"-----BEGIN PRIVATE KEY-----")
    assert b"PRIVATE" not in (keys / "mine.pub").read_bytes()


def test_a_key_is_never_overwritten_nor_put_into_a_run(keys: Path, run: Path) -> None:
    before = (keys / "mine").read_bytes()
    with pytest.raises(UsageError, match="there already"):
        make_key(keys / "mine")
    assert (keys / "mine").read_bytes() == before
    with pytest.raises(UsageError, match="run folder"):
        make_key(run / "replicates" / "key")
    assert not (run / "replicates" / "key").exists()
    shutil.copy(keys / "mine", run / "key")
    with pytest.raises(UsageError, match="run's folder"):
        sign(run, run / "key")


def test_nothing_of_a_private_key_is_in_a_signed_run(run: Path, keys: Path) -> None:
    lines = (keys / "mine").read_bytes().splitlines()
    private = lines[1]
    for path in (p for p in run.rglob("*") if p.is_file()):
        content = path.read_bytes()
        assert b"PRIVATE KEY" not in content, path.name
        assert private not in content, path.name


def pem(kind: str) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    if kind == "ecdsa":
        key: Any = generate_private_key(SECP256R1())
    else:
        key = Ed25519PrivateKey.generate()
    if kind == "public":
        return bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    lock = BestAvailableEncryption(b"x") if kind == "locked" else NoEncryption()
    return bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, lock))


@pytest.mark.parametrize(
    ("kind", "mode", "error", "said"),
    [
        ("ed25519", 0o644, BadFile, "others can read"),
        ("ed25519", 0o640, BadFile, "others can read"),
        ("locked", 0o600, BadFile, "no unencrypted"),
        ("public", 0o600, BadFile, "no unencrypted"),
        ("ecdsa", 0o600, BadFile, "not an ed25519 key"),
        ("missing", 0o600, NotFound, "not there"),
        ("text", 0o600, BadFile, "no unencrypted"),
    ],
)
def test_a_key_that_cannot_be_used_says_why_and_shows_nothing(
    kind: str, mode: int, error: type[KitError], said: str, run: Path, tmp_path: Path
) -> None:
    path = tmp_path / "key"
    content = b"secret words\n" if kind == "text" else b"" if kind == "missing" else pem(kind)
    if kind != "missing":
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(error, match=said) as caught:
        sign(run, path)
    shown = caught.value.message + caught.value.hint + caught.value.detail
    assert not [line for line in content.decode().splitlines() if line in shown]


def test_a_public_key_that_is_none_is_a_bad_file(run: Path, keys: Path) -> None:
    with pytest.raises(BadFile, match="no public key"):
        verify(run, keys / "mine")
    with pytest.raises(NotFound):
        verify(run, keys / "nothing.pub")
