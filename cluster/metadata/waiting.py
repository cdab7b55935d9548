"""Waiting with a time limit. (Shell.)"""

import asyncio


async def wait_for_event(event: asyncio.Event, seconds: float) -> bool:
    """Wait for the event for at most `seconds`, and report whether it is set. It stays as it is."""
    if not event.is_set() and seconds > 0:
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            return event.is_set()
    return event.is_set()
