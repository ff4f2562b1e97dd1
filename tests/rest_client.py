"""A REST client that reads the entity tag before each change."""

from typing import Any

from rest_framework.test import APIClient


class CarefulClient(APIClient):
    """Sends the object's entity tag as If-Match with each change, unless the call sets If-Match."""

    def generic(self, method: str, path: str, *arguments: Any, **options: Any) -> Any:
        needs_tag = method in {"PATCH", "PUT", "DELETE"} or path.endswith(("/state", "/publish", "/revert"))
        if needs_tag and "If-Match" not in (options.get("headers") or {}) and (tag := self.tag_of(path)):
            options["headers"] = {**(options.get("headers") or {}), "If-Match": tag}
        return super().generic(method, path, *arguments, **options)

    def tag_of(self, path: str) -> str | None:
        """Entity tag of the object at a URL or its parent URL; None without one."""
        for url in (path.partition("?")[0], path.rpartition("/")[0]):
            response = super().generic("GET", url)
            if response.status_code == 200 and response.has_header("ETag") and "results" not in response.json():
                return str(response["ETag"])
        return None
