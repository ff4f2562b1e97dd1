"""Who may see and do what: ``rules`` is the table, ``asker`` who asks, ``scope`` what belongs to which project."""
