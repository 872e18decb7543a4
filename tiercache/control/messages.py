"""The messages that a cache accepts on its control socket.

HTTP decodes the same types from JSON, so both front ends refuse the same input with the same text.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar, get_args

import msgspec

from tiercache.core.keys import HEX_KEY
from tiercache.errors import TierCacheError

T = TypeVar("T")

LARGEST_MESSAGE_BYTES = 1 << 20
"""Fits about 200,000 token ids or 20,000 keys; a longer prefix needs keys in several messages."""
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


def error_of(error: ControlError) -> dict[str, Any]:
    """Return the answer that reports an error."""
    return {"error": {"kind": error.kind, "message": str(error)}}


class Lora(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The LoRA adapter of a request, as given to the engine: both fields are part of its block hashes."""

    name: Name
    path: str


class Message(msgspec.Struct, forbid_unknown_fields=True, tag_field="command", kw_only=True):
    """Base of all commands."""

    @property
    def wait_s(self) -> float:
        """Seconds that the message asks the cache to wait, in addition to the time to answer."""
        return float(getattr(self, "until_s", 0.0))


class Prefix(Message, kw_only=True):
    """Base of commands about a prefix: token ids with the engine's extra key parts, or chunk keys in hex."""

    tokens: list[Token] | None = None
    keys: list[HexKey] | None = None
    cache_salt: Word = ""
    lora: Lora | None = None


class Prefetch(Prefix, tag="prefetch", kw_only=True):
    """Announce that this prefix is needed in `deadline_s`. An empty `handle` is replaced by a generated name."""

    deadline_s: Seconds = 0.0
    ttl_s: Seconds = 60.0
    priority: Annotated[int, msgspec.Meta(ge=-1000, le=1000)] = 0
    handle: Word = ""


class Progress(Message, tag="progress", kw_only=True):
    """Report the progress of a prefetch, after waiting for its end for up to `until_s`."""

    handle: Name
    until_s: Wait = 0.0


class Cancel(Message, tag="cancel", kw_only=True):
    handle: Name


class Pin(Prefix, tag="pin", kw_only=True):
    """Keep a prefix hot for `ttl_s`. Chunks that are not hot are fetched first, for up to `until_s`."""

    ttl_s: Seconds = 600.0
    until_s: Wait = 5.0


class Unpin(Prefix, tag="unpin"):
    """Let the prefix's chunks be evicted again."""


class Forget(Prefix, tag="forget"):
    """Remove the prefix's chunks from every tier."""


class Lookup(Prefix, tag="lookup"):
    """Report the length of the cached prefix, and the tiers that hold it."""


class Began(Prefix, tag="began", kw_only=True):
    """Report that a turn of this session has begun. `step` is accepted and has no effect."""

    session: Name
    step: Word = ""


class Ended(Prefix, tag="ended", kw_only=True):
    """Report that a turn has ended. The next turn begins with this prefix. `step` and `kind` have no effect."""

    session: Name
    step: Word = ""
    kind: Word = ""


class Over(Message, tag="over", kw_only=True):
    """Report that the session has ended for good."""

    session: Name


class Statistics(Message, tag="statistics"):
    """Report the contents and counters of the cache."""


class Advise(Message, tag="advise"):
    """Report what other sizes would be worth and why requests missed, with sentences about what to change."""


class Reconfigure(Message, tag="reconfigure", kw_only=True):
    """Change limits, quotas and credentials, by configuration keys as in the file, in at most `until_s`."""

    changes: dict[Name, str | int | float | bool | list[str]]
    until_s: Wait = 60.0


class Reload(Message, tag="reload", kw_only=True):
    """Read the file that the cache was started with again, and apply it, in at most `until_s`."""

    until_s: Wait = 60.0


class Detach(Message, tag="detach", kw_only=True):
    """Write what is queued for a tier for up to `until_s`, and close it."""

    tier: Name
    until_s: Wait = 10.0


class Attach(Message, tag="attach", kw_only=True):
    """Open a tier that was detached, in at most `until_s`."""

    tier: Name
    until_s: Wait = 60.0


Command = (
    Prefetch | Progress | Cancel | Pin | Unpin | Forget | Lookup | Began | Ended | Over | Statistics | Advise
    | Reconfigure | Reload | Detach | Attach
)  # fmt: skip
COMMANDS: dict[str, type[Message]] = {str(kind.__struct_config__.tag): kind for kind in get_args(Command)}

COMMAND: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


def decode(decoder: msgspec.msgpack.Decoder[T] | msgspec.json.Decoder[T], packed: bytes, what: str = "message") -> T:
    """Decode a command. Raises ControlError ("malformed") that says what was expected and where."""
    try:
        return decoder.decode(packed)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ControlError("malformed", f"malformed {what}: {error}") from None
    except RecursionError:
        raise ControlError("malformed", f"malformed {what}: its values are nested too deep") from None
