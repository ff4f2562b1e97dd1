"""Django settings: ``base`` for all, and ``dev`` (the local stack), ``test`` or ``production`` on top."""
