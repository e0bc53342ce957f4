"""Runs the `check_` functions of a script and prints one JSON line: name -> error text, or null."""

import json
import sys
import traceback


def run(namespace: dict) -> None:
    outcomes: dict[str, str | None] = {}
    for name, check in list(namespace.items()):
        if name.startswith("check_"):
            try:
                check()
                outcomes[name] = None
            except Exception:
                outcomes[name] = traceback.format_exc()
    print(json.dumps(outcomes))
    sys.exit(any(outcomes.values()))
