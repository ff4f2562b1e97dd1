import os
import pytest
@pytest.fixture(scope="session")
def browser_type_launch_args():
    return {"executable_path": os.environ.get("CHROMIUM","/usr/bin/chromium-headless-shell"), "args":["--disable-gpu","--disable-dev-shm-usage","--disable-quic","--no-first-run","--disable-background-networking","--disable-component-update","--disable-sync"]}
