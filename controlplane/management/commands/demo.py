"""``manage.py demo``: run the local stack in one terminal, as ``make run`` does."""

import asyncio
import contextlib
import fcntl
import signal
import socket
from collections.abc import Iterator
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from controlplane.stack import plan
from controlplane.stack.plan import StackSettings
from controlplane.stack.servers import ServerMissingError
from controlplane.stack.supervisor import StartError, Supervisor


class Command(BaseCommand):
    """Start all processes of the local stack, print their output, and stop them on Ctrl-C."""

    help = "Run the whole local stack: servers, web UI, worker, router, replicas and traffic."
    requires_system_checks = ()  # the database is not running yet

    def handle(self, *_arguments: Any, **_options: Any) -> None:
        """Run until a signal. CommandError if the stack cannot start."""
        stack = StackSettings.from_environment(settings.DATA_DIR)
        plan.bypass_proxy_for_loopback()
        with _locked_data_dir(stack):
            _check_ports(stack)
            try:
                asyncio.run(_run(stack))
            except (StartError, ServerMissingError) as error:
                raise CommandError(str(error)) from None


async def _run(stack: StackSettings) -> None:
    """Start everything in order, wait for a signal, stop everything."""
    supervisor = Supervisor(width=12)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(signal_number, stopped.set)
    starting = asyncio.ensure_future(_start(supervisor, stack))
    waiting = asyncio.ensure_future(stopped.wait())
    try:
        await asyncio.wait({starting, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            await waiting
        supervisor.print_line("warmpath", "stopping")
    finally:
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError, StartError, ServerMissingError):
            await starting
        await supervisor.stop()


async def _start(supervisor: Supervisor, stack: StackSettings) -> None:
    supervisor.print_line("warmpath", f"starting; data directory {stack.data_dir}")
    await supervisor.start(plan.servers(stack))
    await asyncio.gather(supervisor.run_once(plan.preparation(stack)), supervisor.start(plan.standins(stack)))
    await supervisor.start(plan.control_plane(stack))
    print(f"Warmpath is ready: {stack.web_url}", flush=True)  # noqa: T201 - the line that scripts wait for
    await supervisor.start(plan.traffic_player(stack))


@contextlib.contextmanager
def _locked_data_dir(stack: StackSettings) -> Iterator[None]:
    """Lock the data directory, so that two stacks never share it."""
    settings.STATIC_ROOT.mkdir(parents=True, exist_ok=True)  # below the data directory
    with (stack.data_dir / "lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(
                f"Another stack uses {stack.data_dir}. Stop it, or set WARMPATH_DATA_DIR to another directory."
            ) from None
        yield


def _check_ports(stack: StackSettings) -> None:
    for port, variable in stack.listen_ports().items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((stack.bind, port))
            except OSError as error:
                message = f"Port {port} cannot be used ({error.strerror}). Set WARMPATH_{variable} to another."
                raise CommandError(message) from None
