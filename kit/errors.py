"""Everything that can go wrong and that a person can do something about.

One class per thing the user can do about it; each has an exit code of its own, a one-line
message and a hint that names the next step. Only `kit.cli` catches them.

    KitError
    ├── UsageError            2   wrong arguments
    ├── UnknownName          10   no experiment, image, model or variant of that name
    ├── BadFile              11   a hand-written or recorded file does not say what it must
    ├── NotFound             12   a folder or file the command needs is not there
    ├── EngineMissing        20   no Docker Engine, or compose / buildx missing
    ├── EngineTooOld         21
    ├── EngineForbidden      22   the engine's socket refuses this user
    ├── EngineUnreachable    23   DOCKER_HOST or context points nowhere
    ├── EngineSetupFailed    24   installing or starting the engine failed
    ├── EngineLost           25   the engine went away while it was needed
    ├── NotLocked            30   the image has no lock yet
    ├── IndexUnreachable     31   network or wheel index does not answer
    ├── VariantMissing       32   the index has no wheel of this CUDA variant
    ├── GoneUpstream         33   the index answers "not there" (404, 410)
    ├── HashMismatch         34   other bytes than the lock says
    ├── BuildFailed          35
    ├── IdentityMismatch     36   a built image is not the locked one
    ├── LockConflict         37   two wheels own one path with different content
    ├── ImageMissing         38   the image is not on this engine
    ├── ModelDamaged         40
    ├── HubUnreachable       41
    ├── HubGated             42
    ├── RegistryRefused      43   a registry wants another login, or none may do this
    ├── RegistryUnreachable  44   a registry does not answer
    ├── PortTaken            50
    ├── DiskFull             51
    ├── DeviceMissing        52   an accelerator that the plan asks for is not there
    ├── ToolMissing          53   a program of the host that a step needs is not installed
    ├── ServicesClash        54   two services of a topology claim one port, device or address
    ├── ServerDied           60   a container ended before it was ready
    ├── ServerNotReady       61   not healthy within the time given
    ├── ServerLost           62   died while it was being measured
    ├── ProbeFailed          63   the server runs but cannot be asked from the client container
    ├── ClientFailed         64   the load generator ended with an error
    ├── StaleNumber          70   raw files are not those the manifest was computed from
    ├── RunFolderLost        71   the run folder cannot be written any more
    ├── BundleDamaged        72   a bundle is cut off, or not what it declares
    ├── BundleRefused        73   a bundle is hostile, or of a newer version
    └── SignatureWrong       74   a signature does not fit the key, the manifest or its files
    Interrupted (BaseException)  130 SIGINT, 143 SIGTERM
"""

from __future__ import annotations

import signal

from kit.inside.text import printable

MESSAGE_CHARACTERS = 1_000


class KitError(Exception):
    """Base of all errors that are shown as one line with a next step.

    `hint` is the next step; `detail` holds log lines or a difference, shown below the line.
    Messages quote what is in files of others, so whatever they hold is made printable and short.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "", detail: str = "") -> None:
        self.message = printable(message, MESSAGE_CHARACTERS)
        super().__init__(self.message)
        self.hint = hint
        self.detail = detail


class UsageError(KitError):
    """The command's arguments cannot be used."""

    exit_code = 2


class UnknownName(KitError):
    """No experiment, image, model, variant or platform has this name."""

    exit_code = 10


class BadFile(KitError):
    """A file does not say what it must; the message carries file and path inside it."""

    exit_code = 11


class NotFound(KitError):
    """A folder or file that the command needs is not there."""

    exit_code = 12


class EngineMissing(KitError):
    """No Docker Engine answers here, or its compose or buildx plugin is missing."""

    exit_code = 20


class EngineTooOld(KitError):
    """The engine or a plugin is older than what the kit needs."""

    exit_code = 21


class EngineForbidden(KitError):
    """The engine's socket refuses this user."""

    exit_code = 22


class EngineUnreachable(KitError):
    """DOCKER_HOST or the selected context points to an engine that does not answer."""

    exit_code = 23


class EngineSetupFailed(KitError):
    """Installing or starting the engine failed."""

    exit_code = 24


class EngineLost(KitError):
    """The engine stopped answering in the middle of the work."""

    exit_code = 25


class NotLocked(KitError):
    """The image has no lock, so there are no bits to build."""

    exit_code = 30


class IndexUnreachable(KitError):
    """The package or wheel index does not answer."""

    exit_code = 31


class VariantMissing(KitError):
    """The index answers but has no wheel of the CUDA variant asked for."""

    exit_code = 32


class GoneUpstream(KitError):
    """The index answers that the file is not there (404 or 410)."""

    exit_code = 33


class HashMismatch(KitError):
    """A file has other bytes than the lock says."""

    exit_code = 34


class BuildFailed(KitError):
    """The image build ended with an error."""

    exit_code = 35


class IdentityMismatch(KitError):
    """The built image is not the locked one."""

    exit_code = 36


class LockConflict(KitError):
    """Two wheels own one path with different content: the result would depend on order."""

    exit_code = 37


class ImageMissing(KitError):
    """The image is not on this engine."""

    exit_code = 38


class ModelDamaged(KitError):
    """A model file is missing or has other bytes than its lock says."""

    exit_code = 40


class HubUnreachable(KitError):
    """The model hub does not answer."""

    exit_code = 41


class HubGated(KitError):
    """The hub refuses the repository without an accepted licence or a token."""

    exit_code = 42


class RegistryRefused(KitError):
    """The container registry refuses this login, or there is none."""

    exit_code = 43


class RegistryUnreachable(KitError):
    """The container registry does not answer."""

    exit_code = 44


class PortTaken(KitError):
    """A port that a service needs is in use."""

    exit_code = 50


class DiskFull(KitError):
    """No space left where the kit or the engine must write."""

    exit_code = 51


class DeviceMissing(KitError):
    """An accelerator that the plan asks for is not there or cannot be passed through."""

    exit_code = 52


class ToolMissing(KitError):
    """A program of the host that a step needs is not installed."""

    exit_code = 53


class ServicesClash(KitError):
    """Two services of a topology claim the same port, device or side channel."""

    exit_code = 54


class EnvironmentChanged(KitError):
    """The machine, the kit or an input is not what it was when the run began."""

    exit_code = 55


class DriverTooOld(KitError):
    """The NVIDIA driver serves no CUDA that is new enough for an image."""

    exit_code = 56


class DeviceTooOld(KitError):
    """An image holds no code that a device can run."""

    exit_code = 57


class ServerDied(KitError):
    """A container ended before it was ready."""

    exit_code = 60


class ServerNotReady(KitError):
    """The server did not become healthy in time."""

    exit_code = 61


class ServerLost(KitError):
    """The server died while it was being measured."""

    exit_code = 62


class ProbeFailed(KitError):
    """The server runs but the client container cannot ask it."""

    exit_code = 63


class ClientFailed(KitError):
    """The load generator ended with an error of its own."""

    exit_code = 64


class StaleNumber(KitError):
    """A raw file is not the one that the manifest's numbers were computed from."""

    exit_code = 70


class RunFolderLost(KitError):
    """The run folder was removed or cannot be written any more."""

    exit_code = 71


class BundleDamaged(KitError):
    """A bundle is cut off or was changed; the message names the member."""

    exit_code = 72


class BundleRefused(KitError):
    """A bundle tries what no bundle may, or is of a newer version; the message names the member."""

    exit_code = 73


class SignatureWrong(KitError):
    """A signature does not fit the key, the manifest or what the manifest stands for."""

    exit_code = 74


class Interrupted(BaseException):
    """SIGINT or SIGTERM arrived. Not an `Exception`, so that no broad handler swallows it."""

    def __init__(self, signum: int = signal.SIGINT) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        return 128 + self.signum


def all_errors() -> list[type[KitError]]:
    """Return every error class, by exit code; README's table is tested against it."""
    found: list[type[KitError]] = []
    todo = [KitError]
    while todo:
        cls = todo.pop()
        found.append(cls)
        todo.extend(cls.__subclasses__())
    return sorted(found, key=lambda cls: cls.exit_code)
