"""A fake control plane that receives router announcements."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def serving(handler: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[str]:
    """Handle announcements with ``handler``; the base URL."""
    app = web.Application()
    app.router.add_post("/api/v1/routers/announce", handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def control_plane(statuses: list[int]) -> AsyncIterator[tuple[str, list[dict[str, object]]]]:
    """Respond with these statuses in turn, repeating the last."""
    announcements: list[dict[str, object]] = []

    async def handle(request: web.Request) -> web.Response:
        announcements.append({**await request.json(), "authorization": request.headers.get("Authorization")})
        status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
        return web.json_response({"desired_revision": None}, status=status)

    async with serving(handle) as url:
        yield url, announcements
