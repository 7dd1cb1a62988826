"""What goes wrong, as an HTTP status and OpenAI's error object: one line that says what to do."""

from __future__ import annotations

from potluck.core.errors import CapacityError, InputError, PotluckError, UnknownNameError


class HttpRefusal(PotluckError):
    """A request that is not taken, with the status that says why."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        self.status = status
        self.code = code
        self.param = param
        super().__init__(message)


def error_object(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, object]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": " ".join(message.split()), "type": kind, "param": param, "code": code}}


def refusal(error: Exception) -> HttpRefusal | None:
    """What was raised on purpose, with its status; None for what nobody expected."""
    line = " ".join(str(error).split())
    if isinstance(error, HttpRefusal):
        return error
    if isinstance(error, UnknownNameError):
        return HttpRefusal(404, line, f"{error.field}_not_found", error.field)
    if isinstance(error, InputError):
        return HttpRefusal(400, line, None, error.field or None)
    if isinstance(error, CapacityError):
        return HttpRefusal(400, line, "context_length_exceeded")
    return None
