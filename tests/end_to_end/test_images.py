"""The container images: what is in them, and that their programs run read-only, without root and without a shell."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import secrets
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psycopg
import pytest

from routing import __version__
from tests.conftest import wait_until
from tests.contracts.documents.reading import ROOT
from tests.end_to_end.containers import Container, OciImage, can_contain
from tests.end_to_end.live_stack import free_ports
from tests.fakes.replica import fake_replicas
from tests.routing.proxy.harness import config
from tests.routing.workers.harness import serving

OUTPUT = ROOT / "dist/images"
STALE_LOCK, CANNOT_COMPILE = "StaleLockError", 3
REQUIRED = "REQUIRE_PROGRAMS"
START_S = 300
LOAD_LIBRARIES = """
import ctypes, pathlib, sys
libraries = [path for folder in ("/usr/lib", "/opt") for path in pathlib.Path(folder).rglob("*.so*")]
for path in libraries:
    if not path.is_symlink() and path.parent.name != "ossl-modules":
        ctypes.CDLL(str(path))
print(len(libraries))
"""

pytestmark = pytest.mark.timeout(600)


def build(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "deploy/bootstrap.py", "images", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


class Images(dict[str, OciImage]):
    """The images, each built when a test first needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.options: list[str] = []

    def __missing__(self, name: str) -> OciImage:
        if name == "controlplane" and not (list(OUTPUT.glob(f"warmpath-{name}-*")) or os.environ.get(REQUIRED)):
            pytest.skip("the larger image is tested after `make images`, and if REQUIRE_PROGRAMS is set")
        self[name] = self._built(name)
        return self[name]

    def _built(self, name: str) -> OciImage:
        process = build(name, *self.options)
        if STALE_LOCK in process.stderr and not self.options:  # Debian removes packages that it has replaced
            self.options = ["--latest"]
            process = build(name, *self.options)
        if process.returncode == CANNOT_COMPILE or STALE_LOCK in process.stderr:
            if os.environ.get(REQUIRED):
                pytest.fail(f"{process.stderr} ({REQUIRED} is set)")
            pytest.skip(f"LOUD: the images cannot be built here: {process.stderr}")
        assert process.returncode == 0, process.stdout + process.stderr
        return OciImage(archive_of(name))


def archive_of(name: str) -> Path:
    (path,) = OUTPUT.glob(f"warmpath-{name}-{__version__}-*.oci.tar")
    return path


class Containers(dict[str, Container]):
    """Root file systems of the images."""

    def __init__(self, images: Images, folder: Path) -> None:
        super().__init__()
        self._images, self._folder = images, folder

    def __missing__(self, name: str) -> Container:
        self[name] = Container(self._images[name], self._folder / f"image-{name}")
        return self[name]


@pytest.fixture(scope="module")
def images() -> Images:
    return Images()


@pytest.fixture(scope="module")
def containers(images, short_dir) -> Containers:
    if not can_contain():
        pytest.skip("LOUD: this user may not create a mount namespace, so the images were not run")
    return Containers(images, short_dir)


# --- contents ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["router", "controlplane"])
def test_an_image_is_a_valid_layout_that_runs_as_an_unprivileged_user(images, name):
    image = images[name]

    assert image.layout_version == "1.0.0"
    names = image.descriptor["annotations"]
    assert names["org.opencontainers.image.ref.name"] == __version__
    assert names["io.containerd.image.name"] == f"docker.io/library/warmpath-{name}:{__version__}"
    assert image.config["config"]["User"] == "10001:10001"
    assert image.config["config"]["Labels"]["org.opencontainers.image.version"] == __version__
    assert len(image.layers) == 3


def test_both_images_share_their_first_layer(images):
    first, second = (images[name].manifest["layers"][0] for name in ("router", "controlplane"))
    assert first == second


def test_building_again_gives_the_same_image(images):
    """The last layer is always built again. `images --fresh` builds the others again too."""
    before = images["router"].descriptor["digest"]
    archive_of("router").unlink()
    assert build("router", *images.options).returncode == 0
    assert OciImage(archive_of("router")).descriptor["digest"] == before


@pytest.mark.parametrize("name", ["router", "controlplane"])
def test_files_are_in_order_and_only_the_state_folder_belongs_to_the_user(images, name):
    for layer in images[name].layers:
        with tarfile.open(fileobj=io.BytesIO(layer)) as archive:
            members = archive.getmembers()
        paths = [tuple(member.name.split("/")) for member in members]
        assert paths == sorted(paths)
        assert len({member.mtime for member in members}) == 1
        assert {member.name for member in members if member.uid or member.gid} <= {"var/lib/warmpath"}
        assert [member.name for member in members if member.mode & 0o6022 and not member.issym()] in ([], ["tmp"])


@pytest.mark.parametrize("name", ["router", "controlplane"])
def test_no_image_has_a_shell_or_a_package_manager(containers, name):
    root = containers[name].root
    programs = {path.name for folder in ("usr/bin", "usr/sbin") for path in (root / folder).iterdir()}
    assert programs == {"python", "python3", "python3.11"}
    assert not list((root / "opt/venv").rglob("pip"))


def test_the_router_image_has_no_control_plane(containers):
    code = containers["router"].root / "opt/warmpath"
    assert (code / "routing").is_dir()
    assert not (code / "controlplane").exists()
    assert not list((containers["router"].root / "opt/venv").rglob("django"))


def test_the_control_plane_image_can_export_traces(containers):
    code = "import opentelemetry.exporter.otlp.proto.http.trace_exporter, opentelemetry.instrumentation.django"
    process = containers["controlplane"].run("python", "-c", code)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("name", ["router", "controlplane"])
def test_every_shared_library_finds_the_libraries_that_it_needs(containers, name):
    process = containers[name].run("python", "-c", LOAD_LIBRARIES)
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) > 50


@pytest.mark.parametrize("name", ["router", "controlplane"])
def test_the_bill_of_materials_lists_what_is_installed(containers, name):
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    root = containers[name].root
    text = (root / "usr/share/doc/warmpath/sbom.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None

    components = json.loads(text)["components"]
    listed = {component["purl"].partition("?")[0].partition("@")[0] for component in components}
    modules = (root / "opt/venv").rglob("*.dist-info/METADATA")
    installed = {"pkg:pypi/" + re.sub(r"[-_.]+", "-", name_in(path)).lower() for path in modules}
    debian = {f"pkg:deb/debian/{path.name.replace('+', '%2B')}" for path in (root / "var/lib/dpkg/status.d").iterdir()}
    scripts = {"pkg:npm/htmx.org", "pkg:npm/plotly.js"} if name == "controlplane" else set()
    assert listed == installed | debian | scripts
    assert all(re.fullmatch(r"[0-9a-f]{64}", component["hashes"][0]["content"]) for component in components)
    assert all(component["licenses"][0]["expression"] for component in components)


def name_in(metadata: Path) -> str:
    return re.search(r"^Name: (.+)$", metadata.read_text(), re.MULTILINE)[1]


def test_licences_are_inside_the_image_and_beside_it(images, containers):
    inside = (containers["router"].root / "usr/share/doc/warmpath/THIRD-PARTY-LICENCES.txt").read_text()
    beside = Path(str(archive_of("router")).replace(".oci.tar", ".licences.txt")).read_text()
    assert inside == beside
    assert "uvloop" in inside
    assert "GNU Lesser General Public License" in inside


# --- running -----------------------------------------------------------------------------------------------------


async def test_the_router_serves_read_only_and_compiled(containers, tmp_path):
    container = containers["router"]
    assert container.settings["Entrypoint"] == ["/opt/venv/bin/python", "-m", "routing"]  # what `serving` appends
    tmp_path.chmod(0o755)
    program = tmp_path / "python"
    command = container.command("/opt/venv/bin/python", read_only=tmp_path)
    program.write_text(f'#!/bin/sh\nexec {" ".join(command)} "$@"\n')
    program.chmod(0o755)
    async with (
        fake_replicas(1) as replicas,
        serving(
            tmp_path,
            config(replicas),
            "--workers=2",
            "--state-dir=/var/lib/warmpath/router",
            python=str(program),
            environment=container.environment | {"WARMPATH_BIND": "127.0.0.1"},
        ) as router,
    ):
        assert (await router.chat()).status == 200
        status, _ = await router.admin("GET", "/readyz")
        assert status == 200
        await router.line(f"serving version={__version__} compiled=true python=3.11")
        if os.geteuid() == 0:
            assert has_no_privileges(router.process.pid)


def test_the_router_image_has_what_semantic_caches_need(containers):
    process = containers["router"].run("python", "-c", "import routing.response_cache.semantic")
    assert process.returncode == 0, process.stderr


def has_no_privileges(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    return "Uid:\t10001\t10001" in status and bool(re.search(r"^CapEff:\t0+$", status, re.MULTILINE))


def test_without_a_token_the_router_does_not_open_its_admin_port_to_the_network(containers):
    process = containers["router"].run("/opt/venv/bin/python", "-m", "routing", *containers["router"].settings["Cmd"])
    assert process.returncode != 0
    assert "set WARMPATH_ROUTER_ADMIN_TOKEN" in process.stderr


@contextlib.contextmanager
def forwarded(socket: Path) -> Iterator[int]:
    """A port on the loopback that leads to a Unix socket, which the image's user may not open."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    servers: list[asyncio.Server] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_unix_connection(str(socket))
        await asyncio.gather(copy(reader, upstream_writer), copy(upstream_reader, writer))

    async def serve() -> None:
        servers.append(await asyncio.start_server(accept, "127.0.0.1", 0))
        ready.set()

    def run() -> None:
        loop.run_until_complete(serve())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10)
    yield servers[0].sockets[0].getsockname()[1]

    async def stop() -> None:
        servers[0].close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run_coroutine_threadsafe(stop(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


@pytest.fixture
def production(postgres: Path, valkey: str) -> Iterator[dict[str, str]]:
    """The required settings, with a database and a broker on the loopback."""
    name = f"image_{secrets.token_hex(4)}"
    broker = Path(valkey.partition("//")[2].partition("?")[0])
    with (
        psycopg.connect(host=str(postgres), user="postgres", autocommit=True) as server,
        forwarded(postgres / ".s.PGSQL.5432") as database_port,
        forwarded(broker) as broker_port,
    ):
        server.execute(f"create database {name}")
        yield {
            "WARMPATH_SECRET_KEY": secrets.token_urlsafe(48),
            "WARMPATH_ROUTER_ADMIN_TOKEN": secrets.token_urlsafe(32),
            "WARMPATH_ALLOWED_HOSTS": "127.0.0.1",
            "WARMPATH_DATABASE_URL": f"postgresql://postgres@127.0.0.1:{database_port}/{name}",
            "WARMPATH_REDIS_URL": f"redis://127.0.0.1:{broker_port}/0",
            "WARMPATH_SSL_REDIRECT": "0",
        }
        server.execute(f"drop database {name} with (force)")


def test_the_control_plane_migrates_and_serves_its_pages_read_only(containers, production, tmp_path):
    container = containers["controlplane"]
    migrate = container.run("python", "manage.py", "migrate", **production)
    assert migrate.returncode == 0, migrate.stderr

    (port,) = free_ports(1, spare_after_last=0)
    command = [argument.replace("0.0.0.0:8000", f"127.0.0.1:{port}") for argument in container.settings["Cmd"]]
    log = tmp_path / "web.log"
    with log.open("wb") as output:
        web = subprocess.Popen(
            container.command(*command), env=container.environment | production, stdout=output, stderr=output
        )
    try:
        wait_until(lambda: status_of(port, "/readyz") == 200, START_S, log.read_text, alive=web)
        assert status_of(port, "/healthz") == 200
        page = httpx.get(f"http://127.0.0.1:{port}/accounts/login/", trust_env=False).text
        style_sheets = re.findall(r'href="(/static/css/[\w.-]+\.[0-9a-f]{12}\.css)"', page)
        assert {status_of(port, path) for path in style_sheets} == {200}
    finally:
        web.terminate()
        web.wait(30)


def status_of(port: int, path: str) -> int | None:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=5, trust_env=False).status_code
    return None


@pytest.mark.parametrize("program", ["celery", "warmpath"])
def test_the_other_programs_of_the_control_plane_start(containers, production, program):
    process = containers["controlplane"].run(program, "--help", **production)
    assert process.returncode == 0, process.stderr
