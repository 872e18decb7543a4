"""The messages that a cache takes through its control socket.

The same types are decoded from JSON behind HTTP, so both refuse the same things with the same words.
"""

from __future__ import annotations

from typing import Annotated, get_args

import msgspec

from tiercache.core.keys import HEX_KEY
from tiercache.errors import TierCacheError

LARGEST_MESSAGE_BYTES = 1 << 20
"""Room for about 200,000 token ids or 20,000 keys; a longer prefix is named by its keys, in several messages."""
LONGEST_S = 7 * 86400.0
LONGEST_NAME = 256

Token = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
HexKey = Annotated[str, msgspec.Meta(pattern=f"^{HEX_KEY}$")]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_NAME)]
Word = Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=LONGEST_S)]
Wait = Annotated[float, msgspec.Meta(ge=0, le=60)]


class ControlError(TierCacheError):
    """The refusal of a control message. `kind` is one word for programs, the text is for people."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Lora(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The adapter of a request, as the engine was given it: both are part of its block hashes."""

    name: Name
    path: str


class Message(msgspec.Struct, forbid_unknown_fields=True, tag_field="command", kw_only=True):
    """Base of all commands."""

    @property
    def wait_s(self) -> float:
        """Seconds that the cache waits on purpose, beyond what answering takes."""
        return float(getattr(self, "until_s", 0.0))


class Prefix(Message, kw_only=True):
    """Base of commands about a prefix: its token ids (and what else names it in the engine), or chunk keys in hex."""

    tokens: list[Token] | None = None
    keys: list[HexKey] | None = None
    cache_salt: Word = ""
    lora: Lora | None = None


class Prefetch(Prefix, tag="prefetch", kw_only=True):
    """This prefix is coming in `deadline_s`. `handle` is a name for it that the caller chooses; by default one is made."""

    deadline_s: Seconds = 0.0
    ttl_s: Seconds = 60.0
    priority: Annotated[int, msgspec.Meta(ge=-1000, le=1000)] = 0
    handle: Word = ""


class Progress(Message, tag="progress", kw_only=True):
    """Report how far a prefetch is, after waiting for its end for up to `until_s`."""

    handle: Name
    until_s: Wait = 0.0


class Cancel(Message, tag="cancel", kw_only=True):
    handle: Name


class Pin(Prefix, tag="pin", kw_only=True):
    """Keep a prefix hot for `ttl_s`. What is not hot is fetched first, for up to `until_s`."""

    ttl_s: Seconds = 600.0
    until_s: Wait = 5.0


class Unpin(Prefix, tag="unpin"):
    """Let its chunks be evicted like others."""


class Forget(Prefix, tag="forget"):
    """Remove its chunks from every tier."""


class Lookup(Prefix, tag="lookup"):
    """Report how far the prefix reaches, and in which tiers."""


class Began(Prefix, tag="began", kw_only=True):
    """A turn of this session has begun. `step` is accepted and has no effect."""

    session: Name
    step: Word = ""


class Ended(Prefix, tag="ended", kw_only=True):
    """A turn has ended; the prefix is what the session's next one will begin with. `step` and `kind` have no effect."""

    session: Name
    step: Word = ""
    kind: Word = ""


class Over(Message, tag="over", kw_only=True):
    """The session will not come back."""

    session: Name


class Statistics(Message, tag="statistics"):
    """Report the contents and counters of the cache."""


Command = Prefetch | Progress | Cancel | Pin | Unpin | Forget | Lookup | Began | Ended | Over | Statistics
COMMANDS: dict[str, type[Message]] = {str(kind.__struct_config__.tag): kind for kind in get_args(Command)}

_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


def decode(packed: bytes | bytearray) -> Command:
    """Raises ControlError ("malformed") that says what was expected and where."""
    try:
        return _commands.decode(packed)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ControlError("malformed", f"malformed message: {error}") from None
    except RecursionError:
        raise ControlError("malformed", "malformed message: its values are nested too deep") from None
