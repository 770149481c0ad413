"""Health routes: is the server alive, is it ready, does it really generate? None of them needs a key.

`heartbeats.py` has the limits of silence and of time without progress. `health_probe.py` lets many calls share one generated token.
"""

from __future__ import annotations

from srt.entrypoints.exchange import Exchange
from srt.entrypoints.service import Service
from srt.managers.process.heartbeats import as_json


async def health(exchange: Exchange, service: Service) -> None:
    """Report liveness: this process answers, and no process that it depends on has stopped or hangs.

    It answers under any load, because it reads the other processes' heartbeats from shared memory and waits for nothing.
    """
    await _send_report(exchange, service, is_fine=True)


async def ready(exchange: Exchange, service: Service) -> None:
    """Report readiness: a request sent now would be accepted, by processes that work."""
    await _send_report(exchange, service, is_fine=service.is_ready)


async def health_generate(exchange: Exchange, service: Service) -> None:
    """Generate one token; answer 503 if none comes within the deadline."""
    await exchange.read_body()
    await exchange.run_while_connected(_generate(exchange, service))


async def _generate(exchange: Exchange, service: Service) -> None:
    await service.probe.run(service.engine())
    await exchange.send(200, b"")


async def _send_report(exchange: Exchange, service: Service, *, is_fine: bool) -> None:
    statuses = service.process_statuses()
    trouble = service.trouble(statuses)
    is_fine = is_fine and trouble is None
    report = {
        "status": service.status,
        "ready": service.is_ready and trouble is None,
        "reason": trouble,
        "processes": as_json(statuses),
    }
    await exchange.send_json(report, 200 if is_fine else 503, [] if is_fine else [(b"retry-after", b"1")])
