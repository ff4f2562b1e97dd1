"""The local stack of ``make run``: embedded servers and every process of ours, supervised in one terminal."""
