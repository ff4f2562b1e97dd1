"""``warmpath``, the command line: a thin client of the REST API. It imports neither Django nor the database."""
