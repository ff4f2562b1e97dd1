"""``python -m controlplane.cli``."""

from controlplane.cli.app import main

main()
