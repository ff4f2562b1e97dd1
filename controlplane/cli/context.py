"""What every command is given."""

from __future__ import annotations

from functools import cached_property

import click

from .output import Output
from .rest import Rest
from .site import Site, known_site


class Context:
    """The site and the output that were asked for."""

    def __init__(self, url: str | None, token: str | None, *, as_json: bool) -> None:
        self._url, self._token = url, token
        self.output = Output(as_json=as_json)

    @cached_property
    def rest(self) -> Rest:
        """The site, signed in; a UsageError where none is known."""
        return self.signed_in(known_site(self._url, self._token))

    def signed_in(self, site: Site, **options: float) -> Rest:
        """Another site, until the command is over."""
        rest = Rest(site, **options)
        click.get_current_context().call_on_close(rest.close)
        return rest


pass_context = click.make_pass_decorator(Context)
