"""A client of the REST API as a careful script writes it: it looks before it changes."""

from typing import Any

from rest_framework.test import APIClient


class CarefulClient(APIClient):
    """Asks for an object's entity tag before each change of it and sends that as If-Match, unless told otherwise."""

    def generic(self, method: str, path: str, *arguments: Any, **options: Any) -> Any:
        """One request, and for a change one before it."""
        looks = method in {"PATCH", "PUT", "DELETE"} or path.endswith(("/state", "/publish", "/revert"))
        if looks and "If-Match" not in (options.get("headers") or {}) and (tag := self.tag_of(path)):
            options["headers"] = {**(options.get("headers") or {}), "If-Match": tag}
        return super().generic(method, path, *arguments, **options)

    def tag_of(self, path: str) -> str | None:
        """The tag of the object that an address, or the one above it, names; None where there is none."""
        for address in (path.partition("?")[0], path.rpartition("/")[0]):
            answer = super().generic("GET", address)
            if answer.status_code == 200 and answer.has_header("ETag") and "results" not in answer.json():
                return str(answer["ETag"])
        return None
