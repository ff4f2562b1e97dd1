"""The command ``warmpath``, also ``python -m controlplane.cli``: global options, ``login`` and ``logout``."""

from __future__ import annotations

import sys

import click

from controlplane.cli import fleet, policies, what_if
from controlplane.cli.context import Context, pass_context
from controlplane.cli.rest import Site, credentials_path, delete_credentials, save_credentials, validate_url


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--url", envvar="WARMPATH_URL", help="The site, such as https://warmpath.example.com.")
@click.option(
    "--token",
    envvar="WARMPATH_TOKEN",
    help="An API token. Prefer WARMPATH_TOKEN or 'login': arguments are visible to other processes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.version_option(package_name="warmpath", message="%(version)s")
@click.pass_context
def main(context: click.Context, url: str | None, token: str | None, as_json: bool) -> None:
    """Show and change a Warmpath fleet.

    Exit status: 0 done; 1 rejected or failed; 2 usage error; 3 a plan with changes (plan --exit-code); 4 a rollout that
    did not complete.
    """
    context.obj = Context(url, token, as_json=as_json)


@main.command()
@click.argument("url")
@click.option("--token-stdin", is_flag=True, help="Read the token from standard input instead of prompting.")
@pass_context
def login(context: Context, url: str, *, token_stdin: bool) -> None:
    """Check a site's address and an API token, and store them."""
    token = sys.stdin.readline() if token_stdin else click.prompt("API token", hide_input=True)
    site = Site(validate_url(url), token.strip())
    pools = context.connect(site, retry_for_s=5.0).get("pools", limit=1)["count"]
    save_credentials(site)
    context.output.message(f"Logged in to {site.url}; you see {pools} pools. The token is in {credentials_path()}.")


@main.command()
@pass_context
def logout(context: Context) -> None:
    """Delete the site and the token that 'login' stored."""
    context.output.message("Logged out." if delete_credentials() else "You were not logged in.")


for command in (*fleet.COMMANDS, *policies.COMMANDS, *what_if.COMMANDS):
    main.add_command(command)

if __name__ == "__main__":
    main(prog_name="warmpath")
