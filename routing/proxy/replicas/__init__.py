"""A replica's side: the way to it, its answers, and whether it is well."""
