"""What does a reader get of a run? One HTML page with everything inside: no script, no style sheet, no request."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from lightning_weightsync.report.events import RunEvents

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 62em; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.1em; margin: 1.6em 0 0.3em }
table { border-collapse: collapse } td { padding: 0.1em 1.2em 0.1em 0 } td + td { font-variant-numeric: tabular-nums }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(27em, 1fr)); gap: 0 1.5em }
img { max-width: 100% } pre { background: #f5f6f7; padding: 0.8em; overflow: auto; font-size: 13px }
.bad { color: #b00020 } footer { color: #777; margin-top: 2em }
"""


def make_page(title: str, run: RunEvents, pictures: Mapping[str, str], configuration: str, overrides: str) -> str:
    """The page.

    Args:
        title: Of the run.
        run: Its events.
        pictures: Title -> data URL.
        configuration: As YAML.
        overrides: What the command line had, as YAML.
    """
    figures = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in facts(run).items())
    plots = "".join(
        f'<section><h2>{escape(name)}</h2><img alt="{escape(name)}" src="{url}"></section>'
        for name, url in pictures.items()
    )
    error = f'<p class="bad">The run ended with {escape(run.error)}</p>' if run.error else ""
    losses = "".join(
        f"<li>{event['time']:.1f} s, {f'rank {rank}, ' if run.others else ''}worker {worker}: "
        f"{escape(event['cause'])}</li>"
        for rank, of_rank in run.ranks.items()
        for worker, events in sorted(of_rank.workers.items())
        for event in events
        if "cause" in event and event["state"] == "failed"
    )
    lost = f"<h2>Workers that were lost</h2><ul>{losses}</ul>" if losses else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>{error}'
        f'<table>{figures}</table><div class="plots">{plots}</div>{lost}'
        f"<h2>Overrides</h2><pre>{escape(overrides.strip()) or 'none'}</pre>"
        f"<h2>Configuration</h2><pre>{escape(configuration.strip())}</pre>"
        f"<footer>lightning_weightsync; workers were looked at {run.start.get('looks_per_second', '?')} times a second"
        f"</footer></body></html>\n"
    )


def facts(run: RunEvents) -> dict[str, str]:
    """The figures at the top, by name."""
    start, end = run.start, run.end or {}
    last = run.batches[-1] if run.batches else {}
    each = " of each rank" if run.others else ""
    told = {
        "begun": str(start.get("wall", "")),
        "module": str(start.get("module", "")),
        "workers": f"{start.get('workers', '?')}{each}, {'together' if start.get('sync') else 'ahead'}",
        "ranks": f"{len(run.ranks)}; frames, batches and what pushes cost are rank 0's" if run.others else "",
        "destinations": ", ".join(start.get("destinations", [])),
        "time": f"{run.seconds:.1f} s",
        "frames": str(last.get("frames", 0)),
        "batches": str(len(run.batches)),
        "last mean return": f"{last['return']:.4g}" if "return" in last else "",
        "version": str(last.get("version", "")),
    }
    if end:
        told |= {
            "pushes": str(end["pushes"]),
            "bytes": f"{end['bytes'] / 1e6:.3g} MB",
            "mean stall": f"{end['mean_stall_ms']:.2f} ms",
            "time lost to pushes": f"{100 * end['share_of_time']:.2f} %",
            "staleness": f"at most {end['staleness_max']:g}",
            "restarts": str(sum((of_rank.end or {}).get("restarts", 0) for of_rank in run.ranks.values())),
        }
    return {name: value for name, value in told.items() if value}
