"""``manage.py demo``: the whole live stack in one terminal. ``make run`` calls it."""

import asyncio
import contextlib
import fcntl
import signal
import socket
from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from controlplane.stack import plan
from controlplane.stack.plan import StackSettings
from controlplane.stack.servers import ServerMissingError
from controlplane.stack.supervisor import StartError, Supervisor


class Command(BaseCommand):
    """Start every process of the local stack, show what they say, and stop them all on Ctrl-C."""

    help = "Run the whole local stack: servers, web UI, worker, router, replicas and traffic."
    requires_system_checks = ()  # the database is not up yet

    def add_arguments(self, parser: ArgumentParser) -> None:
        """No arguments: everything is a variable in the environment."""

    def handle(self, *_arguments: Any, **_options: Any) -> None:
        """Run until a signal; CommandError says why it cannot start."""
        stack = StackSettings.from_environment(settings.DATA_DIR)
        plan.proxy_free_environment()
        with _only_one(stack):
            _check_ports(stack)
            try:
                asyncio.run(_live(stack))
            except (StartError, ServerMissingError) as error:
                raise CommandError(str(error)) from None


async def _live(stack: StackSettings) -> None:
    """Bring everything up in order, wait for a signal, take everything down."""
    supervisor = Supervisor(width=12)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stopped.set)
    rising = asyncio.ensure_future(_rise(supervisor, stack))
    waiting = asyncio.ensure_future(stopped.wait())
    try:
        await asyncio.wait({rising, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if rising.done():
            rising.result()
            await waiting
        supervisor.say("warmpath", "stopping")
    finally:
        rising.cancel()
        with contextlib.suppress(asyncio.CancelledError, StartError, ServerMissingError):
            await rising
        await supervisor.stop()


async def _rise(supervisor: Supervisor, stack: StackSettings) -> None:
    supervisor.say("warmpath", f"starting; data is kept in {stack.data_dir}")
    await supervisor.start(plan.servers(stack))
    await asyncio.gather(
        supervisor.run_once(plan.preparation(stack)),
        supervisor.start(plan.standins(stack)),
    )
    await supervisor.start(plan.control_plane(stack))
    print(f"Warmpath is ready: {stack.web_url}", flush=True)  # noqa: T201 - the line that scripts wait for
    await supervisor.start(plan.player(stack))


@contextlib.contextmanager
def _only_one(stack: StackSettings) -> Iterator[None]:
    """Hold the data directory, so that two stacks never share one."""
    settings.STATIC_ROOT.mkdir(parents=True, exist_ok=True)  # below the data directory
    with (stack.data_dir / "lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(
                f"Another stack runs on {stack.data_dir}. Stop it, or set WARMPATH_DATA_DIR to another folder."
            ) from None
        yield


def _check_ports(stack: StackSettings) -> None:
    for port, variable in stack.own_ports().items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((stack.bind, port))
            except OSError as error:
                message = f"Port {port} cannot be used ({error.strerror}). Set WARMPATH_{variable} to another."
                raise CommandError(message) from None
