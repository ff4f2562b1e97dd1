"""How the collected static files are named and stored: ``collectstatic`` uses it, and pages get their URLs from it."""

from whitenoise.storage import CompressedManifestStaticFilesStorage


class StaticFiles(CompressedManifestStaticFilesStorage):  # type: ignore[misc]  # it has no types
    """Compressed files, whose names have a hash of their content: browsers keep them for good.

    Scripts import each other by these names too, so a script never runs with one of another release.
    """

    support_js_module_import_aggregation = True
