"""Starts and controls the OpenID provider of ``oidc_provider.py``."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

PASSWORD = "a password at the provider"
PROGRAM = Path(__file__).with_name("oidc_provider.py")
START_S = 60


class IdentityProvider:
    """A running provider."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.issuer = folder, f"http://127.0.0.1:{port}"
        self.name = f"127.0.0.1-{port}"  # of the provider in the control plane's URLs

    def settings(self, **group_roles: str) -> dict[str, str]:
        """Environment variables that configure the control plane for it."""
        return {
            "WARMPATH_OIDC_ISSUER": self.issuer,
            "WARMPATH_OIDC_CLIENT_ID": "warmpath",
            "WARMPATH_OIDC_CLIENT_SECRET": "the-clients-own-secret",
            "WARMPATH_OIDC_NAME": "Example ID",
            "WARMPATH_OIDC_GROUP_ROLES": ",".join(f"{group}={role}" for group, role in group_roles.items()),
        }

    def set_groups(self, user: str, *groups: str) -> None:
        """Set a user's groups."""
        path = self.folder / "users.json"
        users = json.loads(path.read_text())
        users[user]["groups"] = list(groups)
        path.write_text(json.dumps(users))

    def override_claims(self, *, userinfo: bool = False, **claims: Any) -> None:
        """Replace claims from now on."""
        (self.folder / ("userinfo_claims.json" if userinfo else "claims.json")).write_text(json.dumps(claims))

    def sign_in(self, url: str, user: str, browser: httpx.Client | None = None) -> str:
        """Follow ``url`` like a browser, submit name and password if asked; the final redirect."""
        with browser or httpx.Client(trust_env=False) as session:
            response = session.get(url)
            for _ in range(10):
                if response.is_redirect:
                    target = str(response.next_request.url)
                    if not target.startswith(self.issuer):
                        return target
                    response = session.get(target)
                else:
                    token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', response.text)[1]
                    fields = {"csrfmiddlewaretoken": token, "login": user, "password": PASSWORD}
                    response = session.post(str(response.url), data=fields)
        raise AssertionError(f"the provider did not redirect back: {response.text}")


@contextmanager
def running_provider(folder: Path, *redirect_uris: str) -> Iterator[IdentityProvider]:
    """A provider with the users ada and bob, for the length of a block."""
    folder.mkdir()
    (folder / "users.json").write_text(json.dumps({name: {"password": PASSWORD} for name in ("ada", "bob", "admin")}))
    (folder / "redirect_uris").write_text("\n".join(redirect_uris))
    environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(folder)], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert select.select([process.stdout], [], [], START_S)[0], "the provider did not start"
        yield IdentityProvider(folder, int(process.stdout.readline()))
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()
