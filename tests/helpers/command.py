"""Runs command lines of ``lightning-weightsync`` one after the other in one process, for tests of many.

    python -m tests.helpers.command < lines.json > results.json

Each line is {"arguments": [...], "without": [modules that are not to be found]}; each result {"code", "output",
"seconds"}. Seconds are of processor time: how long other processes keep the machine busy does not count.
"""

import contextlib
import io
import json
import logging
import sys
import time
import traceback


def run(arguments, without=()):
    from lightning_weightsync.cli import main

    output, code = io.StringIO(), 0
    hidden = {name: sys.modules.get(name) for name in without}
    for name in hidden:
        sys.modules[name] = None
    sys.argv = ["lightning-weightsync", *arguments]
    started = time.process_time()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            main()
    except SystemExit as ending:
        code = ending.code
    except Exception:
        code = 1
        traceback.print_exc(file=output)
    finally:
        for name, module in hidden.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module
        logging.getLogger().handlers.clear()
    return {"code": code, "output": output.getvalue(), "seconds": time.process_time() - started}


if __name__ == "__main__":
    results = [run(**line) for line in json.load(sys.stdin)]
    json.dump(results, sys.__stdout__)
