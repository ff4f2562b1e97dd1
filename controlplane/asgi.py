"""The web application, for uvicorn or gunicorn.

Each process starts a watchdog, which reports over the channels that no worker evaluates alert rules any more.
"""

import os
from concurrent.futures import ThreadPoolExecutor

from django.conf import settings
from django.core.asgi import get_asgi_application
from django.utils.module_loading import import_string

from controlplane import tracing
from controlplane.database.schema_check import refuse_foreign_database

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings.production")
tracing.start(tracing.WEB)  # before the middleware is loaded
application = get_asgi_application()
with ThreadPoolExecutor(1) as thread:  # the server imports this module in its event loop, where no query may run
    thread.submit(refuse_foreign_database).result()
import_string(settings.WATCHDOG)()
