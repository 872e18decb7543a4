"""`asyncio.gather`, with the same steps of the loop in every version of Python: 3.12 looks at what is done at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any


class _Gathering(asyncio.Future[list[Any]]):
    """Cancelling it cancels what is gathered."""

    def __init__(self, children: list[asyncio.Future[Any]]) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self.children = children
        self.is_cancelled = False

    def cancel(self, msg: Any | None = None) -> bool:
        if self.done():
            return False
        cancelled = [child.cancel(msg=msg) for child in self.children]
        self.is_cancelled = self.is_cancelled or any(cancelled)
        return any(cancelled)


def gather(*awaitables: Awaitable[Any], return_exceptions: bool = False) -> asyncio.Future[list[Any]]:
    """As `asyncio.gather` of Python 3.11. What is given twice is awaited once."""
    loop = asyncio.get_running_loop()
    if not awaitables:
        empty: asyncio.Future[list[Any]] = loop.create_future()
        empty.set_result([])
        return empty
    children = {id(one): asyncio.ensure_future(one) for one in awaitables}
    outer = _Gathering([children[id(one)] for one in awaitables])
    left = len(children)

    def done(child: asyncio.Future[Any]) -> None:
        nonlocal left
        left -= 1
        if outer.done():
            if not child.cancelled():
                child.exception()  # it counts as seen
            return
        if not return_exceptions:
            if child.cancelled():
                outer.set_exception(_cancelled(child))
                return
            error = child.exception()
            if error is not None:
                outer.set_exception(error)
                return
        if not left:
            if outer.is_cancelled:
                outer.set_exception(_cancelled(child))
            else:
                outer.set_result([_outcome(each) for each in outer.children])

    for child in children.values():
        child.add_done_callback(done)
    return outer


def _outcome(child: asyncio.Future[Any]) -> Any:
    if child.cancelled():
        return _cancelled(child)
    error = child.exception()
    return child.result() if error is None else error


def _cancelled(child: asyncio.Future[Any]) -> BaseException:
    try:
        child.result()
    except asyncio.CancelledError as error:
        return error
    except BaseException:
        pass
    return asyncio.CancelledError()
