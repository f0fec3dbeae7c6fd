"""Keeps secrets and machine addresses out of everything that is written down.

By name where a name says so (options, variables, configuration keys), by form for what looks
like a credential in a text, and by value for secrets that this process knows itself.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import pwd
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kit.inside.text import MASK, mask_text

ADDRESS = "<address>"

_SECRET_WORDS = frozenset((
    "token", "key", "keys", "apikey", "secret", "secrets", "password", "passwd", "passphrase",
    "credential", "credentials",
))  # fmt: skip
_SECRET_PARTS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
_PASSWORD = re.compile(r"://[^/@:\s]*:([^/@\s]+)@")
_HOME_PATH = re.compile(r"(?<![\w./-])/(?:(?:home|Users)/[^/\s\"']+|root(?![\w.-]))")
_ORDINARY_NAMES = frozenset((  # they tell nobody apart, and stand in texts that mean no machine
    "admin", "debian", "docker", "host", "localhost", "nobody", "root", "server", "ubuntu", "user",
    "vllm",
))  # fmt: skip
_SHORTEST_NAME = 3
_SHORTEST_SECRET = 6  # masking shorter values everywhere would destroy the text


def is_secret_variable(name: str, value: str) -> bool:
    """Tell whether an environment variable may hold a secret, by its name.

    A name with TOKENS and a whole number as value is a count, not a secret.
    """
    upper = name.upper()
    if "TOKENS" in upper and value.isascii() and value.isdigit():
        return False
    return any(part in upper for part in _SECRET_PARTS)


def is_secret_option(name: str) -> bool:
    """Tell whether a command-line option or configuration key holds a secret.

    Only the last word decides: `--hf-token` and `api_key` do, `--max-num-batched-tokens`,
    `tokenizer` and `ssl_keyfile` do not.
    """
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    return bool(words) and words[-1] in _SECRET_WORDS


def secret_values(environment: Mapping[str, str]) -> frozenset[str]:
    """Return what variables hold that may be secret, by name or as an address's password."""
    found = {value for name, value in environment.items() if is_secret_variable(name, value)}
    found |= {match[1] for value in environment.values() for match in _PASSWORD.finditer(value)}
    return frozenset(value for value in found if len(value) >= _SHORTEST_SECRET)


def mask_known(text: str, secrets: Iterable[str]) -> str:
    """Mask every secret that stands in a text (a log, a traceback), then what looks like one."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return mask_text(text)


def masked(text: str) -> str:
    """Mask in a text what is secret in this process's own surroundings, and what looks secret."""
    return mask_known(text, secret_values(os.environ))


def private_names() -> frozenset[str]:
    """Return what this machine and this user are called, but for names that all have."""
    found = {os.environ.get(key, "") for key in ("USER", "LOGNAME", "USERNAME", "SUDO_USER")}
    with contextlib.suppress(KeyError):  # a user without a name
        found.add(pwd.getpwuid(os.getuid()).pw_name)
    host = socket.gethostname()
    found |= {host, host.partition(".")[0], Path.home().name}
    return frozenset(
        name for name in found if len(name) >= _SHORTEST_NAME and name not in _ORDINARY_NAMES
    )


def find_private(text: str, names: Iterable[str] | None = None) -> list[str]:
    """Return `line N: what stands there` for each user, host or home path; never the words.

    `names` are those to look for, by default `private_names()`.
    """
    known = sorted(private_names() if names is None else names, key=len, reverse=True)
    inner = "|".join(map(re.escape, known)) or r"(?!)"
    named = re.compile(rf"(?<![A-Za-z0-9_])(?:{inner})(?![A-Za-z0-9_])")
    forms = ((_HOME_PATH, "a home path"), (named, "the name of this user or machine"))
    return [
        f"line {number}: {what}"
        for number, line in enumerate(text.splitlines(), start=1)
        for form, what in forms
        if form.search(line)
    ]


def mask_address(text: str) -> str:
    """Return a placeholder for an IP address that names a machine, else the text.

    Loopback and wildcard addresses say nothing about a machine and stay.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text
    return text if address.is_loopback or address.is_unspecified else ADDRESS


def mask_value(value: Any, *, secret: Callable[[str], bool] = is_secret_option) -> Any:
    """Mask secrets in nested JSON: strings under secret keys, and users in addresses."""
    inner = partial(mask_value, secret=secret)
    if isinstance(value, Mapping):
        return {
            key: MASK if secret(str(key)) and each and isinstance(each, str | list) else inner(each)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [inner(each) for each in value]
    return mask_text(value) if isinstance(value, str) else value


def mask_argv(argv: Iterable[str]) -> list[str]:
    """Mask secrets in a command line: `--api-key X`, `--api-key=X`, keys inside JSON values."""
    shown: list[str] = []
    hide_next = False
    for word in argv:
        if hide_next and not word.startswith("--"):
            shown.append(MASK)
            continue  # an option may take several values
        name, mark, value = word.partition("=")
        hide_next = False
        if not word.startswith("--"):
            shown.append(_mask_word(word))
        elif not is_secret_option(name):
            shown.append(name + mark + _mask_word(value))
        else:
            shown.append(name + mark + (MASK if mark else ""))
            hide_next = not mark
    return shown


def _mask_word(word: str) -> str:
    if word.startswith(("{", "[")):
        try:
            parsed = json.loads(word)
        except (ValueError, RecursionError):
            return mask_text(word)
        masked = mask_value(parsed)
        # Untouched text stays byte for byte what the process received.
        return word if masked == parsed else json.dumps(masked, ensure_ascii=False)
    return mask_text(word)
