import pytest
from django.core.management import call_command


@pytest.mark.django_db
def test_the_migrations_say_what_the_models_say():
    call_command("makemigrations", "--check", "--dry-run", verbosity=0)
