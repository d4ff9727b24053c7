"""Tries invites, all at once: ``strangers.py FOLDER INVITE…`` prints a JSON line for each, in order.

Without the start of the interpreter in it, the time is that until the refusal.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shoal.peer.options import SessionOptions
from shoal.peer.session import Session
from shoal.swarm.errors import ShoalError


def attempt(folder: Path, number: int, invite: str) -> dict[str, Any]:
    began_s = time.monotonic()
    try:
        Session.connect(invite, SessionOptions(identity=folder / f"identity-{number}", bind=("127.0.0.1", 0))).close()
    except ShoalError as error:
        took_s = time.monotonic() - began_s
        return {"error": type(error).__name__, "code": error.exit_code, "text": str(error), "seconds": took_s}
    return {"error": None, "code": 0, "text": "", "seconds": time.monotonic() - began_s}


if __name__ == "__main__":
    folder, invites = Path(sys.argv[1]), sys.argv[2:]
    with ThreadPoolExecutor(len(invites)) as pool:
        tries = [pool.submit(attempt, folder, number, invite) for number, invite in enumerate(invites)]
        for one in tries:
            print(json.dumps(one.result()), flush=True)
