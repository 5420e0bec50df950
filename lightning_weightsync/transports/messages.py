"""What do a sender and a worker say to each other? The schema of their messages; who sends which: docs/architecture.md.

How a message becomes a frame is in ``control``; both ends refuse what is not in here.
"""

from __future__ import annotations

from lightning_weightsync.transports.bodies import Schema

CARRIES_DESCRIPTOR = frozenset({"slot", "joint", "board"})
"""Kinds of messages, of any schema, that bring one file's descriptor."""

LINK_MESSAGES: Schema = {
    "hello": {"worker_idx": int, "pid": int},
    "welcome": {"generation": int, "heartbeat_timeout": float},
    "refused": {"reason": str},
    "board": {},
    "attach": {
        "model_id": str,
        "layout": dict,
        "extra_keys": list,
        "casts": bool,
        "strict": bool,
        "may_hold": bool,
        "backend": str,
        "transport": dict,
    },
    "attached": {"model_id": str, "holds": bool},
    "mismatch": {"model_id": str, "message": str, "missing": list, "unexpected": list, "mismatched": dict},
    "attach_failed": {"model_id": str, "message": str},
    "open": {"model_id": str, "budget": float},
    "opening": {"model_id": str},
    "meet": {"model_id": str, "addresses": dict},
    "push": {"run": int, "version": int, "models": list, "values": dict, "budget": float, "initial": bool},
    "applied": {"run": int, "version": int, "digests": dict},
    "failed": {"run": int, "version": int, "reason": str, "message": str, "traceback": str},
    "slot": {"model_id": str, "index": int, "nbytes": int},
    "retire": {"model_id": str, "index": int},
    "digest": {"model_id": str},
    "digested": {"model_id": str, "digest": str},
    "beat": {},
    "close": {},
}
