"""Prints the requirements of a lock file that apply to a version of CPython on Linux, without their markers.

    python applicable.py LOCK 3.11.2

Needs packaging, so it runs in the environment of ``requirements/compile.txt``.
"""

import platform
import sys
from pathlib import Path

from packaging.requirements import Requirement


def main(lock: str, version: str) -> None:
    """Print them as a lock file with the same hashes."""
    environment = {
        "python_full_version": version,
        "python_version": ".".join(version.split(".")[:2]),
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "platform_machine": platform.machine(),
    }
    for line in Path(lock).read_text().replace("\\\n", " ").splitlines():
        text, *hashes = line.split(" --hash=")
        if text.strip() and not text.startswith("#"):
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate(environment):
                requirement.marker = None
                print(requirement, *(f"--hash={digest.strip()}" for digest in hashes))


if __name__ == "__main__":
    main(*sys.argv[1:])
