from pathlib import Path

from kombu.utils.url import url_to_parts

from controlplane.stack import paths


def test_the_brokers_url_quotes_special_characters_of_the_data_directory():
    folder = Path("/srv/a b%41#c?d")  # short, so that the socket lies below it
    parts = url_to_parts(paths.valkey_url(folder))
    assert folder in paths.valkey_socket(folder).parents
    assert Path(f"/{parts.path.lstrip('/')}") == paths.valkey_socket(folder)
    assert parts.query == {"virtual_host": "0"}
