"""PostgreSQL as it is used here: patient connections, reading of one moment, migrations beside traffic, two roles."""
