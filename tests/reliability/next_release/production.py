"""Production settings of the future release."""

from controlplane.settings.production import *  # noqa: F403 - all of them, and one app more

INSTALLED_APPS = [*INSTALLED_APPS, "tests.reliability.next_release"]  # noqa: F405 - one of all
