"""Signing in and out.

The command line itself: ``warmpath COMMAND``.
"""

from __future__ import annotations

import sys

import click

from controlplane.cli import fleet, policies
from controlplane.cli.context import Context, pass_context
from controlplane.cli.rest import Site, checked_url, forget, keep, place


@click.command()
@click.argument("url")
@click.option("--token-stdin", is_flag=True, help="Read the token from the standard input instead of asking.")
@pass_context
def login(context: Context, url: str, *, token_stdin: bool) -> None:
    """Keep a site's address and an API token, after trying them."""
    text = sys.stdin.readline() if token_stdin else click.prompt("API token", hide_input=True)
    site = Site(checked_url(url), text.strip())
    pools = context.signed_in(site, patience_s=5.0).get("pools", limit=1)["count"]
    keep(site)
    context.output.say(f"Logged in to {site.url}; you see {pools} pools. The token is in {place()}.")


@click.command()
@pass_context
def logout(context: Context) -> None:
    """Forget the site and the token that 'login' kept."""
    context.output.say("Logged out." if forget() else "You were not logged in.")


COMMANDS = (login, logout)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--url", envvar="WARMPATH_URL", help="The site, such as https://warmpath.example.com.")
@click.option("--token", envvar="WARMPATH_TOKEN", help="An API token; better given by WARMPATH_TOKEN or 'login'.")
@click.option("--json", "as_json", is_flag=True, help="Answer JSON instead of tables.")
@click.version_option(package_name="warmpath", message="%(version)s")
@click.pass_context
def main(context: click.Context, url: str | None, token: str | None, as_json: bool) -> None:
    """See and change a Warmpath fleet.

    Exit status: 0 done; 1 refused or failed; 2 not understood; 3 a plan with changes (plan --exit-code); 4 a rollout
    that ended otherwise than complete.
    """
    context.obj = Context(url, token, as_json=as_json)


for command in (*COMMANDS, *fleet.COMMANDS, *policies.COMMANDS, policies.rollout):
    main.add_command(command)
