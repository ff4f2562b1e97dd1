"""Who may see and do what: ``rules`` is the table, ``actor`` who asks, ``scope`` what belongs to which project."""
