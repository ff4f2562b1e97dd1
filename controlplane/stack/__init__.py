"""The local stack of ``make run``: embedded servers and all Warmpath processes under one supervisor."""
