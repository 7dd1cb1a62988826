"""What goes wrong, as an HTTP status and OpenAI's error object: one line that says what to do."""

from __future__ import annotations

import json
import logging
from http import HTTPStatus

from aiohttp import web

from potluck.api.http import HttpRefusal, error_object, refusal
from potluck.api.segments import UNSUPPORTED
from potluck.engine.compute.executor import WorkerLost
from potluck.engine.loop.loop_thread import LoopStopped
from potluck.engine.loop.messages import JobEnded

log = logging.getLogger(__name__)


def ended(end: JobEnded) -> HttpRefusal:
    """A request that the loop could not complete."""
    if end.code == UNSUPPORTED:
        return HttpRefusal(400, end.problem, end.code, "response_format")
    why = f"the request could not be completed ({end.problem or end.reason})"
    return HttpRefusal(503, why, "try_again") if end.again else HttpRefusal(500, why)


def error_body(error: Exception) -> tuple[int, dict[str, object]]:
    """The status and the body for an exception; what nobody expected says nothing of its inside."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    known = refusal(error)
    code = param = None
    if known is not None:
        status, message, code, param = known.status, str(known), known.code, known.param
    elif isinstance(error, LoopStopped | WorkerLost):
        status, message = 503, str(error)
        code = "failed" if isinstance(error, LoopStopped) else "try_again"
    elif isinstance(error, web.HTTPException):
        status = error.status
        message = f"{HTTPStatus(status).phrase}: {_plain(error)}"
    elif isinstance(error, ConnectionError):  # nobody is left to read it
        status, message = 400, "the connection was closed"
    elif isinstance(error, TimeoutError):
        status, message, code = 504, "the request took longer than it may", "deadline"
    else:
        log.error("a handler failed", exc_info=error)
        status, message = 500, "internal error; the engine's log says more"
    return status, error_object(status, message, param=param, code=code)


def _plain(error: web.HTTPException) -> str:
    if error.status == 413:
        return "the body is larger than this engine reads"
    return error.reason


def error_response(error: Exception) -> web.Response:
    status, body = error_body(error)
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    return web.Response(
        status=status, text=json.dumps(body), content_type="application/json", headers=headers
    )
