"""Errors of requests."""

from http import HTTPStatus

from camshaft.errors import CamshaftError


class Refused(CamshaftError):
    """A request that is not accepted.

    The SDK repeats a request after 408, 409, 429, 5xx and some 400 for five minutes, so the mistakes of a client have
    other statuses.
    """

    def __init__(self, message: str, status: HTTPStatus = HTTPStatus.UNPROCESSABLE_ENTITY):
        super().__init__(message)
        self.status = status


class CommandError(CamshaftError):
    """A command that has failed because of its arguments, or of the state of its model: the result of a future."""


class WeightsLost(CamshaftError):
    """Published weights are gone together with the process that had them. They can be published again."""
