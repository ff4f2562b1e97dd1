"""Access control: ``rules`` is the table of roles, ``actor`` holds a user's roles, ``middleware`` checks pages."""
