"""Signing in and out."""

from __future__ import annotations

import sys

import click

from .context import Context, pass_context
from .site import Site, checked_url, forget, keep, place


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
