"""The command line itself: ``warmpath COMMAND``."""

from __future__ import annotations

import click

from . import fleet, policies, rollouts, sign_in
from .context import Context


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


for command in (*sign_in.COMMANDS, *fleet.COMMANDS, *policies.COMMANDS, rollouts.rollout):
    main.add_command(command)
