"""A line between two workers: a message is an object of JSON, in a line of text.

The other end need not be a worker. What is too long, nested too deeply or not JSON is taken for the
end of the line.
"""

import contextlib
import json
import socket
from typing import Any

LONGEST = 100_000
"""Bytes of a message."""


class Line:
    """One end of a line; whether reading from it waits is up to its socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._rest = b""

    def say(self, **message: Any) -> None:
        """Send a message; it is lost if the other end has hung up."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def next(self) -> dict[str, Any] | None:
        """The next message; None if it is not there in time, and an `EOFError` at the end."""
        try:
            while b"\n" not in self._rest:
                if len(self._rest) > LONGEST:
                    raise EOFError("A message has no end.")
                got = self.connection.recv(LONGEST)
                if not got:
                    raise EOFError("The line has ended.")
                self._rest += got
            said, self._rest = self._rest.split(b"\n", 1)
            message = json.loads(said)
        except (BlockingIOError, TimeoutError):
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise EOFError(str(error)) from error
        if not isinstance(message, dict):
            raise EOFError("A message is not an object.")
        return message

    def has_ended(self) -> bool:
        """Whether the other end has hung up, as far as this one can know without waiting."""
        try:
            flags = socket.MSG_PEEK | socket.MSG_DONTWAIT
            return not self.connection.recv(1, flags)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self.connection.close()
