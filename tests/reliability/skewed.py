"""``python -m celery`` with a clock offset in seconds: ``python skewed.py SECONDS ARGUMENTS``."""

import sys
from datetime import UTC, datetime, timedelta

import time_machine

if __name__ == "__main__":
    time_machine.travel(datetime.now(UTC) + timedelta(seconds=float(sys.argv.pop(1))), tick=True).start()
    from celery.__main__ import main

    main()
