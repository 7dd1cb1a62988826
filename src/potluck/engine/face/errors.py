"""What goes wrong, as an HTTP status and OpenAI's error object: one line that says what to do."""

from __future__ import annotations

import json
import logging
from http import HTTPStatus

from aiohttp import web

from potluck.core.errors import CapacityError, InputError, PotluckError, UnknownNameError

log = logging.getLogger(__name__)


class Refused(PotluckError):
    """A request that is not taken, with the status that says why."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        self.status = status
        self.code = code
        super().__init__(message)


def error_body(error: Exception) -> tuple[int, dict[str, object]]:
    """The status and the body for an exception; what nobody expected says nothing of its inside."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    param = code = None
    message = " ".join(str(error).split())
    if isinstance(error, Refused):
        status, code = error.status, error.code
    elif isinstance(error, UnknownNameError):
        status, param, code = 404, error.field, "not_found"
    elif isinstance(error, InputError):
        status, param = 400, error.field or None
    elif isinstance(error, CapacityError):
        status, code = 400, "context_length_exceeded"
    elif isinstance(error, web.HTTPException):
        status = error.status
        message = f"{HTTPStatus(status).phrase}: {_plain(error)}"
    elif isinstance(error, TimeoutError):
        status, message, code = 504, "the request took longer than it may", "deadline"
    else:
        log.error("a handler failed", exc_info=error)
        status, message = 500, "internal error; the engine's log says more"
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


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
