"""A connection between two workers that carries JSON objects."""

import contextlib
import json
import socket
from typing import Any

LONGEST = 100_000
"""Bytes of a message, at most."""


class Connection:
    """One end of a connection that carries JSON objects, one in each line of text.

    The other end need not be a worker: a message that is too long, nested too deeply or not JSON
    counts as the end. Whether `receive` waits is up to the socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._rest = b""

    def send(self, **message: Any) -> None:
        """Send a message; it is lost if the other end has hung up."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """The next message; None if it does not come in time, an `EOFError` at the end."""
        try:
            while b"\n" not in self._rest:
                if len(self._rest) > LONGEST:
                    raise EOFError("A message has no end.")
                got = self.socket.recv(LONGEST)
                if not got:
                    raise EOFError("The connection has ended.")
                self._rest += got
            line, self._rest = self._rest.split(b"\n", 1)
            message = json.loads(line)
        except (BlockingIOError, TimeoutError):
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise EOFError(str(error)) from error
        if not isinstance(message, dict):
            raise EOFError("A message is not an object.")
        return message

    def close(self) -> None:
        self.socket.close()
