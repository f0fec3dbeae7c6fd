"""The commands about images and models; `kit.cli` adds them to the command line."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from kit import console
from kit.errors import KitError

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


def images_command(as_json: Json = False) -> None:
    """Show the image matrix: id, vLLM, CUDA, locked, built, identical."""
    from kit.image_table import image_rows

    rows = image_rows()
    if as_json:
        console.data(rows)
    else:
        console.table("images", list(rows[0]), [list(r.values()) for r in rows])


def build_command(
    ids: Annotated[
        list[str] | None, typer.Argument(help="Image ids; default: this machine's.")
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Build every step anew.")] = False,
    model: Annotated[str | None, typer.Option(help="Model for compose/.env.")] = None,
    platform: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    as_json: Json = False,
) -> None:
    """Build images from their locks, check their identity, and write compose/.env for the first."""
    from kit.build import build, ensure_image
    from kit.image import find_image
    from kit.model import find_model
    from kit.platform import find_platform
    from kit.use import use

    chosen = ids or [find_platform(platform).default_image]
    records = [find_image(one) for one in chosen]
    if model:
        find_model(model)
    built = [
        build(r, no_cache=True, say=console.say) if no_cache else ensure_image(r, console.say)
        for r in records
    ]
    for one in built:
        console.say(f"{one.record.id}: {one.how}, {one.state}, identity {one.identity.digest}")
    fits = records[0].cuda == "cpu" or find_platform(platform).name == "cuda"
    if fits and records[0].serves:
        use(records[0].id, model, platform, console.say)
    if as_json:
        console.data(
            [{"id": b.record.id, "how": b.how, "identity": b.identity.digest} for b in built]
        )


def lock_command(
    image: Annotated[str, typer.Argument(help="Image id.")],
    write: Annotated[bool, typer.Option("--write", help="Write docker/locks/ID/.")] = False,
) -> None:
    """Resolve what an image is made of and show what changed; writes only with --write."""
    from kit import lock
    from kit.image import find_image

    record = find_image(image)
    old = lock.read_lock(record) if record.locked else None
    try:
        with console.step(f"resolve {image}", waits_for="the package indexes"):
            new = lock.resolve(record)
    except KitError as error:
        if write:
            lock.write_attempt(record, error)
        raise
    for line in lock.diff(old, new) or ["nothing changed"]:
        console.say(line)
    if write:
        lock.write(record, new)
        console.say(f"written: docker/locks/{image}/")


def verify_image_command(
    image: Annotated[str, typer.Argument(help="Image id.")], as_json: Json = False
) -> None:
    """Build an image twice from nothing and compare: with itself, layer by layer, and its lock."""
    from kit.image import find_image
    from kit.verify_image import verify

    result = verify(find_image(image), console.say)
    if as_json:
        console.data(result)


def models_command(
    name: Annotated[str | None, typer.Argument(help="Fetch or make this one.")] = None,
    image: Annotated[str | None, typer.Option(help="Image whose tools convert it.")] = None,
    lock: Annotated[
        bool, typer.Option("--lock", help="Make it anew and write its files' hashes as its lock.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the models; with an id, make sure that it is here and check every file."""
    from kit.build import ensure_image
    from kit.errors import UsageError
    from kit.image import find_image
    from kit.model import ensure_model, find_model, load_models, lock_model
    from kit.platform import find_platform

    if name is None:
        if lock:
            raise UsageError("which model is to be locked?", hint="`nox -s models -- MODEL --lock`")
        rows = [
            {"id": m.id, "kind": m.kind, "weights": m.weights, "licence": m.licence}
            for m in load_models().values()
        ]
        if as_json:
            console.data(rows)
        else:
            columns = ["id", "kind", "weights", "licence"]
            console.table("models", columns, [[str(r[c]) for c in columns] for r in rows])
        return
    record = find_model(name)  # names first: an image may have to be built
    built = ensure_image(find_image(image or find_platform(None).default_image), console.say)
    if lock:
        lock_model(record, built, console.say)
    files = ensure_model(record, built, console.say)
    console.say(f"{name}: {len(files.files)} files, {files.bytes} bytes, all as locked")
    if as_json:
        console.data({"id": name, "files": files.files, "bytes": files.bytes})


def use_command(
    image: Annotated[str | None, typer.Argument(help="Image id; default: this machine's.")] = None,
    model: Annotated[str | None, typer.Option(help="Model id.")] = None,
    platform: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    as_json: Json = False,
) -> None:
    """Write compose/.env for plain `docker compose`."""
    from kit.use import use

    values = use(image, model, platform, console.say)
    if as_json:
        console.data(values)


def adopt_command(
    reference: Annotated[str, typer.Argument(help="Tag or id of an image on this engine.")],
    image: Annotated[str, typer.Option("--id", help="The id it gets here.")],
    cuda: Annotated[str, typer.Option(help="cpu, cu129 or cu130.")] = "cu130",
    interpreter: Annotated[str, typer.Option(help="Python inside, with its full path.")] = (
        "/usr/bin/python3"
    ),
    entrypoint: Annotated[str, typer.Option(help="Words that start vLLM, before `serve`.")] = (
        "vllm"
    ),
    user: Annotated[str, typer.Option(help="UID:GID to run as.")] = "10001:0",
    as_json: Json = False,
) -> None:
    """Let this machine measure an image that the kit did not build; every manifest says so."""
    from kit.adopt import adopt

    record = adopt(
        reference,
        image,
        cuda=cuda,
        interpreter=interpreter,
        entrypoint=shlex.split(entrypoint),
        user=user,
        say=console.say,
    )
    if as_json:
        console.data(record.model_dump(mode="json", exclude_defaults=True))


def sbom_command(
    image: Annotated[str, typer.Argument(help="Image id.")],
) -> None:
    """Write an image's bill of materials (CycloneDX) anew from its lock."""
    from kit import lock
    from kit.image import find_image

    record = find_image(image)
    lock.write_sbom(record, lock.read_lock(record))
    console.say(f"written: docker/locks/{image}/{lock.SBOM}")


def push_command(
    image: Annotated[str, typer.Argument(help="Image id.")],
    repository: Annotated[str, typer.Argument(help="HOST/NAME, without tag.")],
    as_json: Json = False,
) -> None:
    """Push an image to an OCI registry and say the digest to pull it by."""
    from kit.image import find_image
    from kit.registry import push

    copy = push(find_image(image), repository, console.say)
    if as_json:
        console.data({"reference": copy.reference, "identity": copy.identity.digest})


def pull_command(
    reference: Annotated[str, typer.Argument(help="HOST/NAME@sha256:…")],
    image: Annotated[str, typer.Argument(help="Image id that it must be.")],
    as_json: Json = False,
) -> None:
    """Pull an image by digest; it is taken only if its identity is the locked one."""
    from kit.image import find_image
    from kit.registry import pull

    copy = pull(reference, find_image(image), console.say)
    if as_json:
        console.data({"reference": copy.reference, "identity": copy.identity.digest})


def add_image_commands(app: typer.Typer) -> None:
    """Add the commands of this module, by the names people type."""
    app.command("images")(images_command)
    app.command("build")(build_command)
    app.command("lock")(lock_command)
    app.command("verify-image")(verify_image_command)
    app.command("models")(models_command)
    app.command("use")(use_command)
    app.command("adopt")(adopt_command)
    app.command("sbom")(sbom_command)
    app.command("push")(push_command)
    app.command("pull")(pull_command)
