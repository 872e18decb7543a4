"""Which of many names are there: all servers are asked at once, with one send each, and read one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from tiercache.errors import TierUnavailable
from tiercache.tiers.remote.redis.address import Endpoint
from tiercache.tiers.remote.redis.channel import Channel, command
from tiercache.tiers.remote.redis.failures import BrokenConnection, ServerError, TooSlow, failure, redirection
from tiercache.tiers.remote.redis.servers import Servers

_ROUNDS = 3


def existing(servers: Servers, names: Sequence[bytes]) -> list[bool]:
    """Names of a server that does not answer are not there; when none answers, TierUnavailable is raised. Blocks."""
    return _Question(servers, names).answered()


class _Question:
    def __init__(self, servers: Servers, names: Sequence[bytes]) -> None:
        self._servers = servers
        self._names = names
        self._found = [False] * len(names)
        self._again = list(range(len(names)))
        """To be asked in the next round: the connection was stale, or the slot has moved."""
        self._alone: list[int] = []
        """To be asked one by one: a slot that is moving."""
        self._heard = False
        self._problem: TierUnavailable | None = None

    def answered(self) -> list[bool]:
        for _ in range(_ROUNDS):
            if self._again:
                asked, self._again = self._again, []
                self._ask(asked)
        for position in [*self._alone, *self._again]:
            self._ask_alone(position)
        if self._problem is not None and not self._heard:
            raise self._problem
        return self._found

    def _ask(self, positions: Sequence[int]) -> None:
        groups: dict[Endpoint, list[int]] = {}
        begun: list[tuple[Channel, list[int]]] = []
        try:
            for position in positions:
                groups.setdefault(self._servers.endpoint_of(self._names[position]), []).append(position)
            for endpoint, members in groups.items():
                try:
                    begun.append((self._servers.take(endpoint), members))
                except TierUnavailable as error:
                    self._problem = error
                    continue
                self._send(*begun[-1])
            for channel, members in begun:
                self._hear(channel, members)
        except TierUnavailable as error:
            self._problem = error
        finally:
            for channel, _ in begun:
                self._servers.pool.give(channel)

    def _send(self, channel: Channel, members: Sequence[int]) -> None:
        frames = b"".join([command(b"EXISTS", self._names[member]) for member in members])
        try:
            channel.request(frames, replies=len(members))
        except BrokenConnection:
            channel.interrupt()  # `_hear` meets it

    def _hear(self, channel: Channel, members: Sequence[int]) -> None:
        for index, member in enumerate(members):
            try:
                self._found[member] = channel.reply() == 1
                self._heard = True
            except ServerError as error:
                self._refused(channel, member, error)
            except BrokenConnection as error:
                stale = channel.used and not isinstance(error, TooSlow)
                self._servers.lost(channel.endpoint)
                if stale:
                    self._again += members[index:]
                else:
                    self._problem = TierUnavailable(f"{self._servers.name}: {error}")
                return

    def _refused(self, channel: Channel, member: int, error: ServerError) -> None:
        if error.code == "MOVED":
            self._servers.topology.forwarded(redirection(error), channel.endpoint)
            self._again.append(member)
        elif error.code in ("ASK", "TRYAGAIN"):
            self._alone.append(member)
        else:
            self._servers.lost(channel.endpoint)
            self._problem = _unavailable(self._servers.name, channel.endpoint, error)

    def _ask_alone(self, position: int) -> None:
        def exchange(channel: Channel) -> bool:
            channel.request(command(b"EXISTS", self._names[position]))
            return channel.reply() == 1

        try:
            self._found[position] = self._servers.run(self._names[position], exchange)
            self._heard = True
        except ServerError as error:
            self._problem = _unavailable(self._servers.name, "the server", error)
        except TierUnavailable as error:
            self._problem = error


def _unavailable(name: str, place: object, error: ServerError) -> TierUnavailable:
    return TierUnavailable(str(failure(name, place, error)))
