"""An OpenID provider as a process of its own: django-allauth's, with sign-in pages, PKCE and RS256.

``python tests/fakes/oidc_provider.py FOLDER`` listens on a free loopback port, which it prints. ``users.json`` in
the folder lists users (``{"ada": {"password", "groups"}}``) and is read for every claim, so tests change groups by
writing it. ``claims.json`` and ``userinfo_claims.json`` replace claims in the ID token and at userinfo.
``redirect_uris`` has one redirect URI per line, where ``PORT`` stands for the provider's port.
"""

import json
import secrets
import sys
import time
from pathlib import Path
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import django
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from django.conf import settings

FOLDER = Path(sys.argv[1])
CLIENT = "warmpath"
SECRET = "the-clients-own-secret"
KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
)


def read(name):
    path = FOLDER / name
    return json.loads(path.read_text()) if path.exists() else {}


settings.configure(
    SECRET_KEY=secrets.token_hex(32),
    ALLOWED_HOSTS=["127.0.0.1"],
    ROOT_URLCONF="oidc_provider",
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(FOLDER / "provider.sqlite")}},
    INSTALLED_APPS=[
        "django.contrib.auth",
        "django.contrib.contenttypes",
        "django.contrib.sessions",
        "django.contrib.messages",
        "allauth",
        "allauth.account",
        "allauth.idp.oidc",
    ],
    MIDDLEWARE=[
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.middleware.csrf.CsrfViewMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
        "allauth.account.middleware.AccountMiddleware",
    ],
    TEMPLATES=[
        {
            "BACKEND": "django.template.backends.django.DjangoTemplates",
            "APP_DIRS": True,
            "OPTIONS": {"context_processors": ["django.template.context_processors.request"]},
        }
    ],
    AUTHENTICATION_BACKENDS=["allauth.account.auth_backends.AuthenticationBackend"],
    PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"],
    SESSION_COOKIE_NAME="provider",  # cookies are not separated by port
    CSRF_COOKIE_NAME="provider-csrf",
    ACCOUNT_LOGIN_METHODS={"username"},
    ACCOUNT_EMAIL_VERIFICATION="none",
    ACCOUNT_RATE_LIMITS=False,
    IDP_OIDC_PRIVATE_KEY=KEY.decode(),
    IDP_OIDC_ADAPTER="oidc_provider.Adapter",
    USE_TZ=True,
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
)
sys.modules["oidc_provider"] = sys.modules[__name__]  # the name of this file in the settings above
django.setup()

from allauth.idp.oidc.adapter import DefaultOIDCAdapter  # noqa: E402 - Django has to be set up first
from allauth.idp.oidc.models import Client  # noqa: E402
from django.contrib.auth.hashers import make_password  # noqa: E402
from django.contrib.auth.models import User  # noqa: E402
from django.core.handlers.wsgi import WSGIHandler  # noqa: E402
from django.core.management import call_command  # noqa: E402
from django.urls import include, path  # noqa: E402

urlpatterns = [path("accounts/", include("allauth.urls")), path("", include("allauth.idp.urls"))]


class Adapter(DefaultOIDCAdapter):
    """Adds groups to authenticated users' claims, and the replacements."""

    def get_claims(self, purpose, user, client, scopes, email=None, **kwargs):
        claims = super().get_claims(purpose, user, client, scopes, email, **kwargs)
        groups = read("users.json").get(user.username, {}).get("groups", [])
        claims |= {"groups": groups, "email": f"{user.username}@example.com", "email_verified": True}
        return claims | (read("userinfo_claims.json") if purpose == "userinfo" else {})

    def populate_id_token(self, id_token, *_, **__):
        id_token["auth_time"] = int(time.time())
        id_token |= read("claims.json")


class Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class Quiet(WSGIRequestHandler):
    def log_message(self, *_):
        (FOLDER / "requests.log").open("a").write(f"{self.requestline}\n")


def main():
    call_command("migrate", verbosity=0)
    for name, attributes in read("users.json").items():
        User.objects.create_user(name, password=attributes["password"], first_name=name.title())
    with make_server("127.0.0.1", 0, WSGIHandler(), Server, Quiet) as server:
        Client.objects.create(
            id=CLIENT,
            name="Warmpath",
            secret=make_password(SECRET),
            scopes="openid\nprofile\nemail",
            redirect_uris=(FOLDER / "redirect_uris").read_text().replace("PORT", str(server.server_port)),
            skip_consent=True,
        )
        print(server.server_port, flush=True)  # noqa: T201 - the parent process reads it
        server.serve_forever()


if __name__ == "__main__":
    main()
