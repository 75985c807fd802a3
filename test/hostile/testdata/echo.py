"""A WebSocket echo on a free port of loopback, which it prints. No extension, no pings of its own."""
import asyncio
import logging

from websockets.asyncio.server import serve

logging.getLogger("websockets").addHandler(logging.NullHandler())
logging.getLogger("websockets").propagate = False


async def echo(ws):
    try:
        async for message in ws:
            await ws.send(message)
    except Exception:  # the cases break the protocol on purpose
        pass


async def main():
    async with serve(echo, "127.0.0.1", 0, max_size=None, compression=None, ping_interval=None) as server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await asyncio.Future()


asyncio.run(main())
