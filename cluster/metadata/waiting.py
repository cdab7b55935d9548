"""Waiting for something, but not for ever. (Shell.)"""

import asyncio


async def wait_for_event(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event is set, waiting for it at most so long. The event stays as it is."""
    if not event.is_set() and seconds > 0:
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            return event.is_set()
    return event.is_set()
