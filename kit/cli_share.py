"""The commands that hand a run to others: bundles and signatures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kit import console
from kit.cli_images import Json

RunFolder = Annotated[Path, typer.Argument(help="A run's folder.")]


def bundle_command(
    run: RunFolder,
    without_image: Annotated[
        bool, typer.Option("--without-image", help="Name the images by their hashes alone.")
    ] = False,
    without_model: Annotated[
        bool, typer.Option("--without-model", help="Name the model's files by their hashes alone.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="The file; default: RUN_ID.kitbundle beside the run.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Put a run into one file: manifest, raw files, locks, model, images; same bytes anywhere."""
    from kit.bundle import make_bundle
    from kit.store import sha256_file

    path, index = make_bundle(
        run, out, console.say, with_image=not without_image, with_model=not without_model
    )
    for one in index.left_out:
        console.say(f"  left out: {one.what} {one.id}: {one.why}; from {one.source}")
    digest, size = sha256_file(path), path.stat().st_size
    console.say(f"bundled: {path} ({size / 2**20:.1f} MiB, sha256 {digest})")
    if as_json:
        left_out = [one.model_dump(mode="json") for one in index.left_out]
        console.data({"bundle": str(path), "bytes": size, "sha256": digest, "left_out": left_out})


def unbundle_command(
    file: Annotated[Path, typer.Argument(help="A bundle.")],
    to: Annotated[Path, typer.Option(help="The new folder; the run is in its `run/`.")],
    load: Annotated[
        bool, typer.Option("--load", help="Load its images into the engine, install its model.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check every byte of a bundle and lay it out as a folder; needs no network."""
    from kit.bundle_load import load_all
    from kit.unbundle import unbundle

    found = unbundle(file, to)
    console.say(f"unbundled: {found.run}")
    for one in found.index.left_out:
        console.say(f"  it leaves out: {one.what} {one.id}: {one.why}; from {one.source}")
    if load:
        load_all(found, console.say)
    if as_json:
        left_out = [one.model_dump(mode="json") for one in found.index.left_out]
        console.data({"run": str(found.run), "run_id": found.manifest.run_id, "left_out": left_out})


def keygen_command(
    out: Annotated[Path, typer.Option(help="The private key's file; `.pub` is beside it.")],
) -> None:
    """Make a key to sign with: ed25519, the private part readable by its owner alone."""
    from kit.sign import make_key

    public, key_id = make_key(out)
    console.say(f"made: {out} (keep it to yourself) and {public} (give it away); key id {key_id}")


def sign_command(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a manifest.")],
    key: Annotated[Path, typer.Option(help="Your private key; `keygen` makes one.")],
) -> None:
    """Sign a run's manifest: verdict, plan, materials and, for a reproduction, its original."""
    from kit.sign import sign

    path, key_id = sign(run, key)
    console.say(f"signed: {path}, key id {key_id}")


def verify_command(
    manifests: Annotated[
        list[Path],
        typer.Argument(
            help="A manifest or run folder; several: a run, its reproduction, and so on."
        ),
    ],
    public_key: Annotated[
        list[Path] | None, typer.Option(help="Whose signature it must be; may be given again.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check who signed a run, and that the manifest's bytes and every raw file are the signed ones.

    Without a public key the signature itself cannot be checked: who signed is then only declared.
    """
    from kit.sign import verify_chain, verify_with

    keys = public_key or []
    chain = (
        verify_chain(manifests, keys) if len(manifests) > 1 else (verify_with(manifests[0], keys),)
    )
    for one in chain:
        said = one.statement.predicate
        word = said.verdict.word if said.verdict else said.status
        again = ""
        if said.reproduces:
            again = f"; {said.reproduces.outcome or 'repeats'}: {said.reproduces.run_id}"
        console.say(f"{one.manifest}: {word}{again}; raw files {one.raw}")
        console.say(f"  {one.state}: signed by {', '.join(one.key_ids)}")
        if one.state == "declared":
            console.warn("the signature itself was not checked: give --public-key FILE")
    if as_json:
        console.data(
            [
                {
                    "manifest": str(one.manifest),
                    "key_ids": list(one.key_ids),
                    "state": one.state,
                    "raw": one.raw,
                    "statement": one.statement.as_json(),
                }
                for one in chain
            ]
        )


def add_share_commands(app: typer.Typer) -> None:
    """Add the commands of this module, by the names people type."""
    app.command("bundle")(bundle_command)
    app.command("unbundle")(unbundle_command)
    app.command("keygen")(keygen_command)
    app.command("sign")(sign_command)
    app.command("verify")(verify_command)
