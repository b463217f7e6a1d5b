"""A proxy that delays the responses of a server, to simulate network latency.

``python -m benchmarks.delay HOST:PORT SECONDS`` prints the port on which it listens, and forwards connections until it
is stopped.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_CHUNK_BYTES = 1 << 18


@contextmanager
def delayed(endpoint: str, seconds: float) -> Iterator[str]:
    """Start a proxy for an HTTP endpoint and yield the endpoint of the proxy.

    Args:
        endpoint: The URL of the server, such as ``http://127.0.0.1:9000/path``.
        seconds: The delay of each response.
    """
    scheme, _, rest = endpoint.partition("://")
    address, slash, path = rest.partition("/")
    command = [sys.executable, "-m", "benchmarks.delay", address, str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as proxy:
        assert proxy.stdout is not None
        try:
            yield f"{scheme}://127.0.0.1:{int(proxy.stdout.readline())}{slash}{path}"
        finally:
            proxy.terminate()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Forward bytes until the connection ends. All bytes are delayed by the same time, so their order is preserved."""
    loop = asyncio.get_running_loop()
    while data := await reader.read(_CHUNK_BYTES):
        if delay_s:
            loop.call_later(delay_s, writer.write, data)
        else:
            writer.write(data)
            await writer.drain()
    loop.call_later(delay_s, writer.close)


async def _serve(address: str, delay_s: float) -> None:
    host, _, port = address.rpartition(":")

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(host, int(port))
        sides = (_forward(reader, to_server, 0.0), _forward(from_server, writer, delay_s))
        await asyncio.gather(*sides, return_exceptions=True)  # a client may close its connection at any time

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], float(sys.argv[2])))
