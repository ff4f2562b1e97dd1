"""Django settings: ``base``, extended by ``dev`` (the local stack), ``test`` or ``production``."""
