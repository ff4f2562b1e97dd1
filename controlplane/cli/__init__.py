"""``warmpath``, the command line: thin over REST, so that it may run anywhere and do no more than its token may.

It imports nothing of the rest of the control plane: no Django, no database.
"""
