"""Runs command lines of ``lightning-weightsync`` one after the other in one process, for tests of many.

    python -m tests.helpers.command < lines.json > results.json

Each line is {"arguments": [...]}, and perhaps "without": modules that are not to be found, or "folder": where it is to
run without starting a process; each result {"code", "output",
"seconds"}. Seconds are of processor time: how long other processes keep the machine busy does not count.
"""

import contextlib
import io
import json
import logging
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that wait for a busy core make small matrices slow

import subprocess
import sys
import time
import traceback


def refuse(*args, **kwargs):
    raise AssertionError("a process was started")


def run(arguments, without=(), folder=None):
    from lightning_weightsync.cli import main

    output, code = io.StringIO(), 0
    hidden = {name: sys.modules.get(name) for name in without}
    for name in hidden:
        sys.modules[name] = None
    before = os.getcwd(), subprocess.Popen.__init__
    if folder is not None:
        os.chdir(folder)
        subprocess.Popen.__init__ = refuse
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
        os.chdir(before[0])
        subprocess.Popen.__init__ = before[1]
        for name, module in hidden.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module
        logging.getLogger().handlers.clear()
    return {"code": code, "output": output.getvalue(), "seconds": time.process_time() - started}


if __name__ == "__main__":
    results = [run(**line) for line in json.load(sys.stdin)]
    json.dump(results, sys.__stdout__)
