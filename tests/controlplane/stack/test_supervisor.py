"""The supervisor, with small real processes."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from controlplane.stack.paths import Child
from controlplane.stack.supervisor import StartError, Supervisor

DEADLINE_S = 60.0


def script(name: str, code: str, **options: object) -> Child:
    return Child(name, [sys.executable, "-c", textwrap.dedent(code)], **options)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter: it ended while its status was read
        return False


async def until(condition, description: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.02)


async def test_start_returns_when_the_child_is_ready(tmp_path):
    ready_file = tmp_path / "ready"
    supervisor = Supervisor()
    child = script(
        "a", f"open({str(ready_file)!r}, 'w'); input_ = __import__('signal').pause()", ready=ready_file.exists
    )

    await supervisor.start([child], timeout_s=DEADLINE_S)

    assert ready_file.exists()
    await supervisor.stop()


async def test_a_child_that_ends_while_starting_is_reported_with_its_output():
    supervisor = Supervisor()
    child = script("broken", "print('no such database'); raise SystemExit(3)", ready=lambda: False)

    with pytest.raises(StartError, match=r"(?s)broken ended \(status 3\).*no such database"):
        await supervisor.start([child], timeout_s=DEADLINE_S)
    await supervisor.stop()


async def test_a_child_that_is_never_ready_fails_at_the_deadline():
    supervisor = Supervisor()
    with pytest.raises(StartError, match=r"slow was not ready within 0\.3 s"):
        await supervisor.start([script("slow", "__import__('signal').pause()", ready=lambda: False)], timeout_s=0.3)
    await supervisor.stop()


async def test_a_killed_child_is_restarted(tmp_path):
    starts = tmp_path / "starts"
    starts.touch()
    code = f"import os, signal; open({str(starts)!r}, 'a').write(f'{{os.getpid()}}\\n'); signal.pause()"
    child = script("phoenix", code, ready=lambda: bool(starts.read_text()), restart_pause_s=0.01)
    supervisor = Supervisor()
    await supervisor.start([child], timeout_s=DEADLINE_S)

    os.kill(int(starts.read_text().split()[0]), signal.SIGKILL)

    await until(lambda: len(starts.read_text().split()) == 2, "a second start")
    await supervisor.stop()
    assert not any(is_running(int(pid)) for pid in starts.read_text().split())


async def test_stopping_ends_grandchildren_too(tmp_path):
    pids = tmp_path / "pids"
    code = f"""
        import os, signal, subprocess, sys
        grandchild = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{grandchild.pid}} .")
        signal.pause()
    """
    child = script("parent", code, ready=lambda: pids.exists() and pids.read_text().endswith("."))
    supervisor = Supervisor()
    await supervisor.start([child], timeout_s=DEADLINE_S)
    pids_of_both = [int(pid) for pid in pids.read_text().split()[:2]]

    await supervisor.stop()

    await until(lambda: not any(map(is_running, pids_of_both)), "parent and grandchild to end")


async def test_children_end_when_the_supervisor_is_killed(tmp_path):
    pid_file = tmp_path / "pid"
    code = f"""
        import asyncio, sys
        from controlplane.stack.paths import Child
        from controlplane.stack.supervisor import Supervisor
        body = "import os, signal; open({str(pid_file)!r}, 'w').write(str(os.getpid()) + '.'); signal.pause()"
        async def main():
            await Supervisor().start([Child("c", [sys.executable, "-c", body])])
            await asyncio.Event().wait()
        asyncio.run(main())
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    await until(lambda: pid_file.exists() and pid_file.read_text().endswith("."), "the child to start")

    parent.kill()
    parent.wait()

    child = int(pid_file.read_text().rstrip("."))
    await until(lambda: not is_running(child), "the child to end after its parent")


async def test_run_once_reports_a_nonzero_status():
    supervisor = Supervisor()
    await supervisor.run_once(script("fine", "print('done')"))
    with pytest.raises(StartError, match=r"(?s)bad ended \(status 1\).*ValueError: no"):
        await supervisor.run_once(script("bad", "raise ValueError('no')"))
    await supervisor.stop()


async def test_output_of_children_is_prefixed_with_their_name(capsys):
    supervisor = Supervisor(width=6)
    await supervisor.run_once(script("talker", "print('hello')"))
    await supervisor.stop()

    assert "talker hello" in capsys.readouterr().out


async def test_a_killed_child_is_restarted_although_a_grandchild_holds_its_output_open(tmp_path):
    pids = tmp_path / "pids"
    pids.touch()
    code = f"""
        import os, signal, subprocess, sys
        grandchild = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        open({str(pids)!r}, "a").write(f"{{os.getpid()}} {{grandchild.pid}}\\n")
        signal.pause()
    """
    child = script("worker", code, ready=lambda: pids.read_text().endswith("\n"), restart_pause_s=0.01)
    supervisor = Supervisor()
    await supervisor.start([child], timeout_s=DEADLINE_S)
    parent, grandchild = map(int, pids.read_text().split())

    os.kill(parent, signal.SIGKILL)

    await until(lambda: pids.read_text().count("\n") == 2, "a second start")
    await until(lambda: not is_running(grandchild), "the grandchild to be killed")
    await supervisor.stop()


async def test_a_grandchild_in_its_own_session_does_not_delay_the_stop(tmp_path):
    pid_file = tmp_path / "pid"
    code = f"""
        import os, subprocess, sys
        own = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
        open({str(pid_file)!r}, "w").write(f"{{own.pid}}.")
        __import__("signal").pause()
    """
    child = script("parent", code, ready=lambda: pid_file.exists() and pid_file.read_text().endswith("."))
    supervisor = Supervisor()
    await supervisor.start([child], timeout_s=DEADLINE_S)
    try:
        async with asyncio.timeout(DEADLINE_S):
            await supervisor.stop()
    finally:
        os.kill(int(pid_file.read_text().rstrip(".")), signal.SIGKILL)
