"""The web application, for uvicorn or gunicorn."""

import os

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings.production")
application = get_asgi_application()
